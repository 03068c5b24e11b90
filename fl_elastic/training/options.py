"""Settings of an elastic trainer besides budget and policy, and checks of a trainer's arguments."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, ModelError, SettingError, TrainingError
from fl_elastic.given import is_real, whole
from fl_elastic.groups.batch import CountExamples
from fl_elastic.groups.torch_private import uncompiled
from fl_elastic.optimizers import check_callable
from fl_elastic.planning.importance import IMPORTANCES, Importance
from fl_elastic.profiling.clock import CLOCKS
from fl_elastic.profiling.prefix import StoreTerms
from fl_elastic.training.feature_codec import PRECISIONS, FeatureCodec

_LOG = logging.getLogger("fl_elastic")
# Largest number of names in a message.
_SHOWN = 4


@dataclass(frozen=True)
class ForwardOptions:
    """How the frozen prefix runs.

    The prefix runs in eval mode, so dropout or stochastic depth inside it is off, as in inference.

    Parameters
    ----------
    feature_bytes : int
        Bound of the feature store; 0 for none. A store saves time if the same examples come back without random
        augmentation of the inputs: within a fit of several epochs, or in later fits, if the store is a file and
        nothing trains below its cut meanwhile.
    precision : {"fp16", "fp32", "int8"}
        How features are stored.
    path : path-like, optional
        File for the features, kept for later fits and processes; if left out, features are held in memory. Features
        are deleted once a fit over all data no longer contains their example.
    """

    feature_bytes: int = 0
    precision: str = "fp16"
    path: str | os.PathLike[str] | None = None

    def terms(self, examples: int, epochs: float) -> StoreTerms | None:
        """Return the properties of the store that a planner uses; None without a store."""
        size = PRECISIONS[self.precision].itemsize
        return (
            StoreTerms(self.feature_bytes, size, examples, epochs) if self.feature_bytes else None
        )

    def __post_init__(self) -> None:
        FeatureCodec(self.precision, (1,))
        if self.feature_bytes < 0:
            raise SettingError(f"feature_bytes {self.feature_bytes} must not be negative")


@dataclass(frozen=True)
class TrainablePart:
    """Which part of a model may be trained, whatever the policy says.

    Parameters
    ----------
    cut : str
        The fleet's cut: the deepest group, or module, that is trained. Empty for no cut.
    kept_head : str
        Group of a head that was solved for (`fl_elastic.closed_form.head.closed_form_head`) and is not trained.
        Empty for none.
    keep_statistics : bool
        Whether norms run with their present statistics, as in eval mode, and do not update them: the statistics of
        pretraining are better than those of a small batch, and a solved head fits only the statistics that it was
        solved with. The norms' weights and biases are trained as usual.
    """

    cut: str = ""
    kept_head: str = ""
    keep_statistics: bool = False


@dataclass(frozen=True)
class Timing:
    """How a fit times its steps, and which time counts.

    Parameters
    ----------
    closed_loop : bool
        Whether steps are timed while training, and the plan corrected by the result. If not, the plan depends on
        the stored cost profile alone, so that a simulation is reproducible.
    clock : {"auto", "wall", "cpu"}
        See `fl_elastic.profiling.clock.clock_for`.
    profile_seconds, planning_seconds : float
        For simulations, where times are not measured: seconds charged for estimating costs, and for making each
        plan.
    """

    closed_loop: bool = True
    clock: str = "auto"
    profile_seconds: float = 0.0
    planning_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise SettingError(f"clock {self.clock!r} is unknown: use {', '.join(CLOCKS)}")
        for name in ("profile_seconds", "planning_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SettingError(f"{name} {getattr(self, name)} must not be negative")


@dataclass(frozen=True)
class TrainerOptions:
    """Settings of `ElasticTrainer` besides budget and policy.

    Parameters
    ----------
    importance : str or Importance
        Registered score, or an object, used by policies that need one.
    full_update_every : int
        A policy that leaves groups out to keep the budget (`Policy.needs_coverage`) trains all groups, for
        fewer steps in the same time, on average in one of this many fits and at least in one of twice as many. So
        each client trains every group with a known probability under any time budget. If memory or uplink do not
        admit all groups at once, such a fit trains those left out for longest that fit. A fit also trains all
        groups if a first fit cannot pay for a probe, or if making a plan takes more than a twentieth of a deadline.
        0 turns this off; with 1 every fit does so.
    proximal : float
        Weight of FedProx's proximal term, which pulls the trained tensors towards the weights that the fit started
        from (Li et al., MLSys 2020); 0 for none.
    forward : ForwardOptions, optional
        Runs the frozen prefix as inference, optionally with stored features; by default the forward pass is not
        changed.
    part : TrainablePart
        The part of the model that may be trained.
    timing : Timing
        How steps are timed.
    count_examples : callable, optional
        ``count_examples(inputs, targets)`` returns the number of examples in a batch, which weights the client's
        update and the means of its evaluation. By default it is derived from the targets, see
        `fl_elastic.groups.batch.batch_size`.
    accumulate : int
        Number of batches whose mean gradient each optimiser step takes. The last step of a fit may have fewer, and
        their gradients are divided by this number all the same. Budgets and reports still count batches; an update
        counts optimiser steps.
    seed : int
        Seed of random choices; a federation uses a new one for each client and round.
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
        if (whole(self.accumulate) or 0) < 1:
            raise SettingError(
                f"accumulate {self.accumulate!r} must be a whole number, at least 1 batch"
            )
        for name in ("full_update_every", "seed"):
            value = getattr(self, name)
            if whole(value) is None or value < 0:
                raise SettingError(f"{name} {value!r} must be a whole number, and not be negative")
        if not is_real(self.proximal) or not 0 <= self.proximal < float("inf"):
            raise SettingError(f"proximal {self.proximal!r} must be a number, and not be negative")


def check_parts(model: nn.Module, loss_fn: object, optimizer_fn: object, budget: object) -> None:
    """Check the kinds of a trainer's arguments.

    Raises
    ------
    ModelError, TrainingError, BudgetError
        If one is of the wrong kind: a class instead of an object, an optimiser instead of a callable, a number.
    """
    uncompiled(model)
    if not callable(loss_fn):
        raise TrainingError(
            f"loss_fn {_kind_of(loss_fn)} cannot be called: give a function, such as cross_entropy"
        )
    check_callable(optimizer_fn)
    if isinstance(loss_fn, type):
        raise TrainingError(f"loss_fn {_kind_of(loss_fn)} is no function{_call_advice(loss_fn)}")
    if not isinstance(budget, Budget):
        raise BudgetError(
            f"budget {budget!r} is a {type(budget).__name__}, not a Budget: say for example "
            "Budget(speedup=2.0)"
        )


def _kind_of(given: object) -> str:
    """Describe a wrong argument in one line: a class by its name, any other object by its type."""
    return given.__name__ if isinstance(given, type) else f"of type {type(given).__name__}"


def _call_advice(given: object) -> str:
    return f" but a class: give {given.__name__}(...)" if isinstance(given, type) else ""


def eager(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was called on, with a warning; any other module as it is."""
    original = uncompiled(model)
    if original is not model:
        _LOG.warning(
            "the model is compiled, but its steps run uncompiled, since each new plan would be compiled again. "
            "A training loop of your own under apply_plan runs the compiled model"
        )
    return original


def say_what_loss_keeps(model: nn.Module, loss_fn: object) -> None:
    """Warn of weights of the loss, such as the centres of classes: they are in no plan and in no update."""
    if not isinstance(loss_fn, nn.Module):
        return
    known = {id(parameter) for parameter in model.parameters()}
    own = [n for n, p in loss_fn.named_parameters() if p.requires_grad and id(p) not in known]
    if own:
        _LOG.warning(
            "the loss has weights of its own (%s), which no plan trains and no update holds: to train and send "
            "them, make them part of the model", ", ".join(own[:_SHOWN]),
        )  # fmt: skip


def whole_epochs(epochs: object) -> int:
    """Return a number of epochs as int; raise TrainingError if it is not a positive whole number.

    >>> import numpy as np
    >>> whole_epochs(np.int64(2))
    2
    """
    found = whole(epochs)
    if found is None or found < 1 or isinstance(epochs, float):
        raise TrainingError(f"epochs {epochs!r} must be a whole number, at least 1")
    return found


def refuse_untrainable(model: nn.Module) -> None:
    """Raise ModelError for a model that no plan can train: no parameters, no values, or sparse gradients."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "the model has no trainable parameter: set requires_grad on the parameters to train"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"tensor {name!r} is on the meta device, without values: load the model's weights first"
            )
        if tensor.is_inference():
            raise ModelError(
                f"tensor {name!r} was made in inference mode and cannot be trained: build the model outside of "
                "torch.inference_mode()"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"layer {name!r} has sparse=True, whose gradients cannot be compared or merged: use sparse=False"
            )
