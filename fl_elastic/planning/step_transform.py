"""The interface of step transforms: what a plan changes about its steps, besides which groups they train."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import Block
from fl_elastic.profiling import CostProfile

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fl_elastic.groups import Batch
    from fl_elastic.planning.plan import Plan

__all__ = ["Part", "StandIn", "StepCase", "StepGuard", "StepOpener", "StepTransform"]

Part = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Which rows and which columns of a tensor are trained; a vector has one column."""


@dataclass(frozen=True, eq=False)
class StepCase:
    """What the memory of a step is told by.

    Attributes
    ----------
    profile : CostProfile
        Costs of the operations that run.
    lean : bool
        Whether layers run by `fl_elastic.ops`, which keep only what their mode needs.
    recomputed : tuple of Block
        Blocks that keep their input alone and run a second time.
    """

    profile: CostProfile
    lean: bool = False
    recomputed: tuple[Block, ...] = ()


class StandIn(Protocol):
    """A tensor that stands in the place of a parameter for one step."""

    @property
    def whole(self) -> nn.Parameter:
        """The model's own parameter."""

    @property
    def part(self) -> nn.Parameter:
        """What the step trains instead."""

    def take(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor of the parameter's shape."""


class StepGuard(Protocol):
    """Keeps what a plan does not train as it is, through the steps of an optimiser."""

    def put_back(self) -> None:
        """Undo, after a step, what it has moved."""

    def finalize(self) -> None:
        """Leave the optimiser as it shall be after the last step."""


class StepOpener(Protocol):
    """Prepares model and optimiser for each step by itself.

    Attributes
    ----------
    held : mapping of str to sequence of array
        Of each tensor that was trained in part, by axis which indices some step held.
    """

    held: Mapping[str, Sequence[NDArray[np.bool_]]]

    def step(
        self, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> AbstractContextManager[Sequence[StandIn]]:
        """Prepare the step on a batch inside the block."""

    def close(self, steps: int) -> None:
        """Make the whole model fit for use after a fit of so many steps, see `StepTransform.closing_passes`."""


@dataclass(frozen=True)
class StepTransform:
    """One way in which the steps of a plan differ from plain ones; methods that are not overridden do nothing.

    A subclass is a frozen dataclass of a few settings. The functions that run, time, price and undo a plan call
    these methods on all of `Plan.transforms` and know none of them by name.

    Attributes
    ----------
    stage : int
        Transforms are applied in this order: 0 replaces layers, 1 changes what passes between modules, 2 wraps
        modules as they are by then.
    runs_part : bool
        Whether steps run a part of the model, or of its inputs. Costs are not corrected by the time of such steps,
        and a fit under a limit on sending keeps its first such plan.
    opens_steps : bool
        Whether each step has an `opener`, so that `ElasticTrainer` alone can take it.
    """

    stage: ClassVar[int] = 1
    runs_part: ClassVar[bool] = False
    opens_steps: ClassVar[bool] = False

    @property
    def lasts_a_fit(self) -> bool:
        """Whether a fit that has begun with it keeps its first plan."""
        return False

    def check(self, model: nn.Module, plan: Plan) -> None:
        """Raise PlanError if a training loop cannot run the plan by itself."""

    def applied(self, model: nn.Module, plan: Plan) -> AbstractContextManager[Any]:
        """Return a block in which the model runs by it; on leaving the model is as before."""
        del model, plan
        return nullcontext()

    def guard(
        self,
        model: nn.Module,
        plan: Plan,
        copies: Mapping[str, NDArray[Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> StepGuard | None:
        """Return what puts untrained parts of tensors back after each step; None if nothing needs it.

        Parameters
        ----------
        model : nn.Module
            At the weights that stay.
        plan : Plan
            That is applied.
        copies : mapping of str to array
            Copies of present weights that somebody else holds already, by name.
        optimizer : torch optimiser, optional
            Whose steps they are.
        """
        del model, plan, copies, optimizer
        return None

    def opener(self, model: nn.Module, before: StepOpener | None) -> StepOpener | None:
        """Return what opens each step by itself; None if steps need nothing of the kind.

        ``before`` is that of an earlier plan of the same fit: what it has noted is carried on.
        """
        del model, before
        return None

    def closing_passes(self, model: nn.Module, steps: int) -> int:
        """Return how many forward passes a fit of so many steps takes after the last of them."""
        del model, steps
        return 0

    def finished(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Leave the optimiser as it shall be after a fit that ended by the plan."""

    def seconds(self, profile: CostProfile) -> float:
        """Return by how much a step takes longer than the profile says of its modes."""
        del profile
        return 0.0

    def case(self, case: StepCase) -> StepCase:
        """Return what the memory of a step is told by once it is applied."""
        return case

    def trained_part(
        self, name: str, group: TensorGroup, mode: Mode, model: nn.Module
    ) -> Part | None:
        """Return the part of a parameter that is trained; None for all of it."""
        del name, group, mode, model
        return None

    def feature_key(self, below: Collection[str] | None = None) -> tuple[str, ...]:
        """Return what tells features from those of plain steps; empty if nothing does.

        ``below`` are the modules that hand them on, or hold what does; None for all of the model.
        """
        del below
        return ()
