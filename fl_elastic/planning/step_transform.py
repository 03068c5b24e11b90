"""The interface of step transforms: changes of a plan's steps other than which groups they train."""

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


Part = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Masks of the rows and columns of a tensor that are trained; a vector has one column."""


@dataclass(frozen=True, eq=False)
class StepCase:
    """The inputs of the memory model for one step.

    Attributes
    ----------
    profile : CostProfile
        Costs of the operations that run.
    lean : bool
        Whether all layers are run by `fl_elastic.ops`, which keep only what their mode needs.
    recomputed : tuple of Block
        Blocks that store only their input and run a second time.
    """

    profile: CostProfile
    lean: bool = False
    recomputed: tuple[Block, ...] = ()


class StandIn(Protocol):
    """A tensor that replaces a parameter for one step."""

    @property
    def whole(self) -> nn.Parameter:
        """The model's own parameter."""

    @property
    def part(self) -> nn.Parameter:
        """The tensor that the step trains in place of `whole`."""

    def take(self, whole: Tensor) -> Tensor:
        """Return, of a tensor that has the parameter's shape, the entries that the step trains."""


class StepGuard(Protocol):
    """Keeps what a plan does not train unchanged through the steps of an optimiser."""

    def remember(self) -> None:
        """Remember, before a step, the values that it must not change."""

    def put_back(self) -> None:
        """Undo the changes of a step to values that the plan does not train."""

    def finalize(self) -> None:
        """Put the optimiser into the state that it must have after the last step."""


class StepOpener(Protocol):
    """Prepares model and optimiser for each single step.

    Attributes
    ----------
    held : mapping of str to sequence of array
        For each tensor that is trained in part, one mask per axis of the indices that any step has trained.
    """

    held: Mapping[str, Sequence[NDArray[np.bool_]]]

    def step(
        self, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> AbstractContextManager[Sequence[StandIn]]:
        """Prepare the step on a batch, for the duration of the context."""

    def close(self, steps: int) -> None:
        """Make the whole model usable after a fit of ``steps`` steps; see `StepTransform.closing_passes`."""


@dataclass(frozen=True)
class StepTransform:
    """One way in which the steps of a plan differ from plain ones; methods that are not overridden do nothing.

    A subclass is a frozen dataclass of a few settings. The functions that run, time, price and undo a plan call
    these methods on all of `Plan.transforms` and do not depend on their types.

    Attributes
    ----------
    stage : int
        Order of application: 0 replaces layers, 1 changes the tensors between modules, 2 wraps the modules that
        result.
    runs_part : bool
        Whether steps run only a part of the model, or of its inputs. The times of such steps are not used to
        correct costs, and a fit under a limit on sending keeps its first plan of this kind.
    opens_steps : bool
        Whether each step has an `opener`; then only `ElasticTrainer` can take the steps.
    """

    stage: ClassVar[int] = 1
    runs_part: ClassVar[bool] = False
    opens_steps: ClassVar[bool] = False

    @property
    def lasts_a_fit(self) -> bool:
        """Whether a fit that begins with this transform keeps its first plan."""
        return False

    def check(self, model: nn.Module, plan: Plan) -> None:
        """Raise PlanError if a training loop cannot run the plan without `ElasticTrainer`."""

    def applied(self, model: nn.Module, plan: Plan) -> AbstractContextManager[Any]:
        """Return a context in which the model runs with this transform; leaving it restores the model."""
        del model, plan
        return nullcontext()

    def guard(
        self,
        model: nn.Module,
        plan: Plan,
        copies: Mapping[str, NDArray[Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> StepGuard | None:
        """Return the guard that puts untrained parts of tensors back after each step; None if none is needed.

        Parameters
        ----------
        model : nn.Module
            The model at the weights to keep.
        plan : Plan
            The plan that is applied.
        copies : mapping of str to array
            Copies of present weights that the caller already holds, by name.
        optimizer : torch optimiser, optional
            The optimiser that takes the steps.
        """
        del model, plan, copies, optimizer
        return None

    def opener(self, model: nn.Module, before: StepOpener | None) -> StepOpener | None:
        """Return the opener of each step; None if steps need no preparation.

        ``before`` is the opener of an earlier plan of the same fit, whose records are carried on.
        """
        del model, before
        return None

    def closing_passes(self, model: nn.Module, steps: int) -> int:
        """Return the number of forward passes that a fit of ``steps`` steps takes after the last one."""
        del model, steps
        return 0

    def finished(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Put the optimiser into the state that it must have after a fit that ended with this plan."""

    def seconds(self, profile: CostProfile) -> float:
        """Return the extra seconds of a step beyond the profile's prediction for its modes."""
        del profile
        return 0.0

    def case(self, case: StepCase) -> StepCase:
        """Return the inputs of the memory model with this transform applied."""
        return case

    def trained_part(
        self, name: str, group: TensorGroup, mode: Mode, model: nn.Module
    ) -> Part | None:
        """Return the part of a parameter that is trained; None for all of it."""
        del name, group, mode, model
        return None

    def feature_key(self, below: Collection[str] | None = None) -> tuple[str, ...]:
        """Return a key that distinguishes features from those of plain steps; empty if they are the same.

        ``below`` are the modules at and below the features; None means the whole model.
        """
        del below
        return ()
