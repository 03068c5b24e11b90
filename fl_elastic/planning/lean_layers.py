"""Layers run by `fl_elastic.ops`: layers in modes that torch lacks, and all layers if memory is limited."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic.planning.step_transform import Part, StepCase, StepGuard, StepTransform

if TYPE_CHECKING:
    import torch

    from fl_elastic.planning.plan import Plan


@dataclass(frozen=True)
class LeanLayers(StepTransform):
    """Run layers that are trained by channels or with filtered gradients by the library's own operations.

    Attributes
    ----------
    everywhere : bool
        Whether all other layers, too, are run by operations that keep only what their mode needs.
    channels : mapping of str to tuple of int
        Trained channels of each group that is trained by channels; set by the trainer if the policy does not choose
        them itself.
    """

    everywhere: bool = False
    channels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stage: ClassVar[int] = 0

    def check(self, model: nn.Module, plan: Plan) -> None:
        """Raise PlanError if a group is trained by channels that were not chosen."""
        del model
        for group, mode in zip(plan.groups, plan.modes, strict=True):
            if mode.kind == "channels" and group.name not in self.channels:
                raise PlanError(
                    f"the plan trains channels of {group.name!r} that were not chosen: make it with plan_for"
                )

    def applied(self, model: nn.Module, plan: Plan) -> AbstractContextManager[Any]:
        """Return a context in which the layers keep only what their mode needs."""
        # Imported here: plans that train layers whole, with memory to spare, do not need it.
        from fl_elastic.ops.lean import lean

        modes, channels = self._modes(plan), self._channels(plan)
        return lean(model, modes, channels, only_named=not self.everywhere)

    def guard(
        self,
        model: nn.Module,
        plan: Plan,
        copies: Mapping[str, NDArray[Any]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> StepGuard | None:
        """Return the guard that restores untrained channels after each step; None if all channels are trained."""
        from fl_elastic.planning.channel_guard import ChannelGuard

        del optimizer
        return ChannelGuard(plan, model, copies) if self.channels else None

    def case(self, case: StepCase) -> StepCase:
        """Return the case, marked as lean if all layers keep only what their mode needs."""
        return replace(case, lean=self.everywhere or case.lean)

    def trained_part(
        self, name: str, group: TensorGroup, mode: Mode, model: nn.Module
    ) -> Part | None:
        """Return the rows and columns of a parameter that the chosen channels cover."""
        weight = model.get_parameter(name)
        if group.name not in self.channels or not mode.trains_part_of(weight.shape):
            return None
        from fl_elastic.ops.channels import ChannelSubset

        channels = self.channels[group.name]
        rows, columns = (np.zeros(length, dtype=np.bool_) for length in (*weight.shape, 1, 1)[:2])
        if mode.axis == "neuron":
            rows[list(channels)] = True
            return rows, ~columns
        layer = model.get_submodule(name.rpartition(".")[0])
        groups = int(getattr(layer, "groups", 1))
        for block in ChannelSubset.of(channels, mode.axis, weight.shape, groups).blocks:
            rows[block.outputs] = True
            columns[block.columns] = True
        return rows, columns

    def _modes(self, plan: Plan) -> dict[str, Mode]:
        """Return the modes that need the library's operations, by the module that owns the group."""
        found = {}
        pairs = zip(plan.layers, plan.modes, plan.groups, strict=bool(plan.layers))
        for layers, mode, group in pairs:
            if group.kind is GroupKind.NORM:
                # A norm's gradients are by-products of the error gradient: computing a part of them costs as much
                # as all.
                continue
            once = len(layers) == 1 and mode.needs_operations
            # A bias alone needs no stored input, however often its layer runs.
            for layer in layers if once or (self.everywhere and mode.kind == "bias") else ():
                if layer:
                    found[layer] = mode
        return found

    def _channels(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        return {
            layers[0]: self.channels[group.name]
            for layers, group in zip(plan.layers, plan.groups, strict=bool(plan.layers))
            if group.name in self.channels and group.kind is not GroupKind.NORM
        }
