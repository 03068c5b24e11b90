"""What is trained, how, and what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.profiling.profile import Mask

if TYPE_CHECKING:
    from fl_elastic.planning.tokens import KeptTokens
    from fl_elastic.planning.windows import Windows

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """A choice of tensor groups to train; tuples are in backward order.

    Attributes
    ----------
    policy : str
        Who chose it.
    groups : tuple of TensorGroup
        All groups of the model.
    modes : tuple of Mode
        How each group is trained.
    full_step_seconds, predicted_step_seconds, floor_step_seconds : float
        A step that trains everything, this plan's step, and the cheapest step there is.
    allowed_step_seconds : float
        What the budget allows per step; infinite without a time budget.
    predicted_step_bytes : float
        Saved activations, gradients and optimiser state of one step.
    lean : bool
        Whether layers run by `fl_elastic.ops`, which keep only what their mode needs.
    recomputed : tuple of str
        Modules that keep only their input and run a second time in the backward pass.
    sending_seconds : float
        Share of the round's deadline that sending the update takes; not part of the step times.
    layers : tuple of tuple of str
        Modules in whose operations each group takes part, as often as they run. Empty if no policy made the plan,
        whose groups can only be trained whole.
    channels : mapping of str to tuple of int
        Trained channels of each group whose mode is a share of its channels; filled in by the trainer where the
        policy does not choose them itself.
    erases_momentum : bool
        Whether the optimiser forgets which way went what is not trained, so that it starts anew when it is thawed.
    windows : Windows, optional
        The channels of inner widths that steps run at all, forward as well; None for all of them. Modes say how
        a layer's gradient is computed, a window which part of a model of several layers there is.
    tokens : KeptTokens, optional
        Behind which blocks of a transformer a step goes on with some of the tokens; None where with all.
    """

    policy: str
    groups: tuple[TensorGroup, ...]
    modes: tuple[Mode, ...]
    full_step_seconds: float
    predicted_step_seconds: float
    floor_step_seconds: float
    allowed_step_seconds: float
    predicted_step_bytes: float
    lean: bool = False
    recomputed: tuple[str, ...] = ()
    sending_seconds: float = 0.0
    layers: tuple[tuple[str, ...], ...] = ()
    channels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    erases_momentum: bool = False
    windows: Windows | None = None
    tokens: KeptTokens | None = None

    def full(self) -> Plan:
        """Return the plan of a full step: every group is trained whole, by torch's own layers and on all inputs."""
        return Plan(
            policy=self.policy,
            groups=self.groups,
            modes=tuple(Mode.FULL for _ in self.modes),
            full_step_seconds=self.full_step_seconds,
            predicted_step_seconds=self.full_step_seconds,
            floor_step_seconds=self.floor_step_seconds,
            allowed_step_seconds=self.allowed_step_seconds,
            predicted_step_bytes=self.predicted_step_bytes,
            layers=self.layers,
        )

    @property
    def mask(self) -> Mask:
        """Groups that are trained in any mode, shape (N,)."""
        return np.array([not mode.is_frozen for mode in self.modes])

    @property
    def depth(self) -> int:
        """Index of the deepest trained group; everything below it is the frozen prefix."""
        return max(i for i, mode in enumerate(self.modes) if not mode.is_frozen)

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the plan trains."""
        names: list[str] = []
        for group, mode in zip(self.groups, self.modes, strict=True):
            names += mode.trains(group)
        return tuple(names)

    @property
    def predicted_speedup(self) -> float:
        """Full step time over this plan's."""
        return self.full_step_seconds / self.predicted_step_seconds

    @property
    def feasible(self) -> bool:
        """Whether one step of the plan fits the allowed step time."""
        return self.predicted_step_seconds <= self.allowed_step_seconds * (1 + 1e-9)

    @property
    def step_fraction(self) -> float:
        """Share of the requested steps that fits the budget: an infeasible plan takes fewer steps."""
        return min(1.0, self.allowed_step_seconds / self.predicted_step_seconds)
