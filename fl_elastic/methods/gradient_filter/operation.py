"""The operation of convolutions with filtered gradients, and what it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fl_elastic.groups.mode import Mode
from fl_elastic.ops.geometry import ConvGeometry
from fl_elastic.ops.lean_forward import ConvForward, LeanForward
from fl_elastic.ops.mode_operation import OPERATIONS, ModeOperation


@dataclass(frozen=True)
class _Filtered(ConvForward):
    def run(self, x: Tensor) -> Tensor:
        from fl_elastic.methods.gradient_filter.convolution import filtered_conv2d

        return filtered_conv2d(
            x, self.module.weight, self.module.bias, self.geometry, self.mode.patch,
            filters_input=self.mode.filters_input,
        )  # fmt: skip


@OPERATIONS.register("filtered")
class FilteredOperation(ModeOperation):
    """Trains convolutions by gradients computed from means over patches of the output gradient."""

    def forward(self, module: nn.Conv2d, geometry: ConvGeometry, mode: Mode) -> LeanForward:
        """Return a forward function that keeps only the patch means of the convolution's input."""
        return _Filtered(module, mode, geometry)

    def kept_numbers(self, given: Sequence[int], output: Sequence[int], mode: Mode) -> float:
        """Return the number of patch means of the input."""
        stride = max(1, round(given[2] / max(output[2], 1)))
        side = mode.patch * stride
        patches = math.ceil(given[2] / side) * math.ceil(given[3] / side)
        return float(given[0] * given[1] * patches)

    def joined(self, module: nn.Module, modes: Mapping[nn.Module, Mode]) -> LeanForward | None:
        """Return a forward function of a Sequential that runs its filtered convolutions as chains, or None.

        See `joined_forward`.
        """
        from fl_elastic.methods.gradient_filter.joined import joined_forward

        return joined_forward(module, modes)
