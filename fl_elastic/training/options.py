"""Settings of an elastic trainer beyond budget and policy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fl_elastic.errors import BudgetError, ProfileError
from fl_elastic.groups.batch_size import CountExamples
from fl_elastic.planning.importance import IMPORTANCES, Importance
from fl_elastic.profiling.clock import CLOCKS
from fl_elastic.profiling.prefix import StoreTerms
from fl_elastic.training.feature_codec import PRECISIONS, FeatureCodec

__all__ = ["ForwardOptions", "Timing", "TrainablePart", "TrainerOptions"]


@dataclass(frozen=True)
class ForwardOptions:
    """How the frozen prefix runs.

    The prefix runs in eval mode: a dropout or random depth inside of it is off, as it is in inference.

    Parameters
    ----------
    feature_bytes : int
        Bound of the feature store; 0 for none. It pays when the same prepared examples come back without random
        augmentation of the inputs: within a fit of several epochs, or in later fits, where the store is a file and
        nothing trains below its cut meanwhile.
    precision : {"fp16", "fp32", "int8"}
        How features are stored.
    path : path-like, optional
        File for the features, which stays for later fits and processes; memory if left out. Features of examples
        that a fit over all data does not meet any more are wiped.
    variants : int
        Prepared variants of each example that the loader draws from (see `Variants`): so many more are kept.
    channels_last : bool
        Whether image inputs of the prefix are laid out channels last, which is faster on most CPUs.
    augment : callable, optional
        Random change of the features, applied anew in each step: augmentation that a store allows.
    """

    feature_bytes: int = 0
    precision: str = "fp16"
    path: str | os.PathLike[str] | None = None
    variants: int = 1
    channels_last: bool = True
    augment: Callable[[Tensor], Tensor] | None = None

    def terms(self, examples: int, epochs: float) -> StoreTerms | None:
        """Return what the store is worth to a plan: passes over so many examples; None without a store."""
        size = PRECISIONS[self.precision].itemsize
        return (
            StoreTerms(self.feature_bytes, size, examples, epochs) if self.feature_bytes else None
        )

    def __post_init__(self) -> None:
        FeatureCodec(self.precision, (1,))
        if self.feature_bytes < 0:
            raise BudgetError(f"feature_bytes {self.feature_bytes} must not be negative")
        if self.variants < 1:
            raise BudgetError(f"variants {self.variants} must be at least 1")


@dataclass(frozen=True)
class TrainablePart:
    """What of a model may be trained, whatever the policy says.

    Parameters
    ----------
    cut : str
        The fleet's cut: the deepest group, or module, that is trained. Empty for none.
    kept_head : str
        Group of a head that was solved for (`fl_elastic.update.closed_form.closed_form_head`) and is not trained.
        Empty for none.
    keep_statistics : bool
        Whether norms run with the statistics that they have, as in eval mode, and leave them as they are: what a
        pretrained model has seen tells more than a small batch, and a head that was solved for fits no others.
        Their weights and biases are trained as ever.
    """

    cut: str = ""
    kept_head: str = ""
    keep_statistics: bool = False

    @property
    def leaves_out(self) -> bool:
        """Whether a part of the model stays as it is, so that nobody takes full steps."""
        return bool(self.cut or self.kept_head)


@dataclass(frozen=True)
class Timing:
    """How a fit knows the time of its steps, and which time counts.

    Parameters
    ----------
    closed_loop : bool
        Measure the steps while training and correct the plan. Off, the plan depends on the stored cost profile
        alone, so that a simulation is reproducible.
    clock : {"auto", "wall", "cpu"}
        See `fl_elastic.profiling.clock_for`.
    charge_probes : bool
        Whether a deadline holds for the probes of importance as well.
    profile_seconds, planning_seconds : float
        Where times are not measured: what a fit is charged with for costs that it had to estimate first, and for
        each plan that has to be made, as a simulation says.
    """

    closed_loop: bool = True
    clock: str = "auto"
    charge_probes: bool = True
    profile_seconds: float = 0.0
    planning_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise ProfileError(f"clock {self.clock!r} is unknown: use {', '.join(CLOCKS)}")
        for name in ("profile_seconds", "planning_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BudgetError(f"{name} {getattr(self, name)} must not be negative")


@dataclass(frozen=True)
class TrainerOptions:
    """Settings of `ElasticTrainer` beyond budget and policy.

    Parameters
    ----------
    importance : str or Importance
        Registered score, or an object, used by policies that need one.
    full_update_every : int
        On average every so many fits, and at least every twice as many, a policy that leaves groups out for the
        budget's sake (`Policy.needs_coverage`) trains all of them for fewer steps in the same time, so that each
        client trains every group with a known probability under any time budget. Where memory or uplink exclude
        everything at once, it trains what fits of the groups left out for longest. The same is done where a first
        fit cannot pay for a probe, and where making a plan takes more than a twentieth of a deadline. 0 turns it
        off, 1 does so always.
    proximal : float
        Weight of FedProx's pull towards the weights that the fit started from (Li et al., MLSys 2020), on the
        tensors that are trained; 0 for none.
    forward : ForwardOptions, optional
        Runs the frozen prefix as inference, perhaps out of a cache; left out, the forward pass is as it is.
    part : TrainablePart
        What may be trained.
    timing : Timing
        How the time of steps is known.
    count_examples : callable, optional
        ``count_examples(inputs, targets)`` returns how many examples a batch has, which weigh the client's update
        and the means of its evaluation; left out, the targets say it, see
        `fl_elastic.groups.batch_size.batch_size`.
    accumulate : int
        Batches whose mean gradient each step of the optimiser takes. Budgets and reports go on counting batches;
        the steps of an update are those of the optimiser.
    seed : int
        Seed of random choices: in a federation a new one for each client and round.
    """

    importance: str | Importance = "elastic"
    full_update_every: int = 4
    proximal: float = 0.0
    forward: ForwardOptions | None = None
    part: TrainablePart = TrainablePart()
    timing: Timing = Timing()
    count_examples: CountExamples | None = None
    accumulate: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        IMPORTANCES.check(self.importance)
        if self.accumulate < 1:
            raise BudgetError(f"accumulate {self.accumulate} must be at least 1 batch")
        if self.full_update_every < 0:
            raise BudgetError(f"full_update_every {self.full_update_every} must not be negative")
        if not 0 <= self.proximal < float("inf"):
            raise BudgetError(f"proximal {self.proximal} must not be negative")
