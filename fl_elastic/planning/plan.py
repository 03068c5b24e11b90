"""Plans: which groups are trained, in which mode, and at what predicted cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.planning.step_transform import StepCase, StepTransform
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import StepMemory, step_memory
from fl_elastic.profiling.profile import Mask

if TYPE_CHECKING:
    from fl_elastic.planning.lean_layers import LeanLayers


Kind = TypeVar("Kind", bound=StepTransform)


@dataclass(frozen=True)
class Plan:
    """A choice of tensor groups to train; tuples are in backward order.

    Attributes
    ----------
    policy : str
        Name of the policy that made the plan.
    groups : tuple of TensorGroup
        All groups of the model.
    modes : tuple of Mode
        How each group is trained.
    full_step_seconds, predicted_step_seconds, floor_step_seconds : float
        Time of a full step, of this plan's step, and of the cheapest possible step.
    allowed_step_seconds : float
        Time that the budget allows per step; infinite without a time budget.
    predicted_step_bytes : float
        Saved activations, gradients and optimiser state of one step.
    sending_seconds : float
        Part of the round's deadline that sending the update takes; not included in the step times.
    layers : tuple of tuple of str
        For each group, the modules whose operations use its parameters, with one entry per call. Empty if no policy
        made the plan; its groups can then only be trained whole.
    transforms : tuple of StepTransform
        Other changes of the steps: replaced operations, recomputed blocks, skipped inputs.
    """

    policy: str
    groups: tuple[TensorGroup, ...]
    modes: tuple[Mode, ...]
    full_step_seconds: float
    predicted_step_seconds: float
    floor_step_seconds: float
    allowed_step_seconds: float
    predicted_step_bytes: float
    sending_seconds: float = 0.0
    layers: tuple[tuple[str, ...], ...] = ()
    transforms: tuple[StepTransform, ...] = ()

    def full(self) -> Plan:
        """Return the plan of a full step: all groups are trained whole, with torch's own layers and all inputs."""
        return replace(
            self,
            modes=tuple(Mode.FULL for _ in self.modes),
            predicted_step_seconds=self.full_step_seconds,
            sending_seconds=0.0,
            transforms=(),
        )

    def transform(self, kind: type[Kind]) -> Kind | None:
        """Return the transform of this kind; None if the plan has none."""
        return next((each for each in self.transforms if isinstance(each, kind)), None)

    def having(self, transform: StepTransform) -> Plan:
        """Return the plan with this transform, which replaces one of the same kind."""
        others = [each for each in self.transforms if not isinstance(transform, type(each))]
        return replace(self, transforms=tuple(sorted([*others, transform], key=lambda t: t.stage)))

    @property
    def channels(self) -> Mapping[str, tuple[int, ...]]:
        """Trained channels of each group that is trained by channels."""
        layers = self.lean_layers
        return {} if layers is None else layers.channels

    @property
    def lean(self) -> bool:
        """Whether all layers are run by `fl_elastic.ops`, which keep only what their mode needs."""
        layers = self.lean_layers
        return layers is not None and layers.everywhere

    @property
    def lean_layers(self) -> LeanLayers | None:
        """The transform that runs layers by `fl_elastic.ops`; None if all layers are torch's own."""
        if not self.transforms:
            return None
        # Imported here: plans of plain steps do not need it.
        from fl_elastic.planning.lean_layers import LeanLayers

        return self.transform(LeanLayers)

    def case(self, profile: CostProfile) -> StepCase:
        """Return the inputs of the memory model for a step of this plan, from the costs of plain steps."""
        case = StepCase(profile)
        for transform in self.transforms:
            case = transform.case(case)
        return case

    def memory(self, profile: CostProfile) -> StepMemory:
        """Return the memory of a step, from the costs of a plain one."""
        case = self.case(profile)
        return step_memory(case.profile, self.modes, lean=case.lean, recomputed=case.recomputed)

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
        """Time of a full step over that of this plan's step."""
        return self.full_step_seconds / self.predicted_step_seconds

    @property
    def feasible(self) -> bool:
        """Whether one step of the plan fits the allowed step time."""
        return self.predicted_step_seconds <= self.allowed_step_seconds * (1 + 1e-9)

    @property
    def step_fraction(self) -> float:
        """Share of the requested steps that fits the budget; below 1 if the plan is infeasible."""
        return min(1.0, self.allowed_step_seconds / self.predicted_step_seconds)
