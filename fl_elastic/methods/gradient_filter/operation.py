"""Convolutions with filtered gradients, which keep only the patch means of their input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fl_elastic.groups.mode import Mode
from fl_elastic.methods.gradient_filter.gradients import (
    filtered_input_gradient,
    filtered_weight_gradient,
    pooled_input,
)
from fl_elastic.methods.gradient_filter.patches import patch_sums
from fl_elastic.ops.autograd import apply_function, once_differentiable
from fl_elastic.ops.geometry import ConvGeometry
from fl_elastic.ops.lean_forward import ConvForward, LeanForward
from fl_elastic.ops.mode_operation import OPERATIONS, ModeOperation


@dataclass(frozen=True)
class _Filtered(ConvForward):
    def run(self, x: Tensor) -> Tensor:
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


def filtered_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    patch: int,
    *,
    filters_input: bool = False,
) -> Tensor:
    """Return the output of a convolution whose weight gradient is filtered over patches; the bias's is exact.

    Parameters
    ----------
    x : Tensor
        ``[N, Ci, H, W]``; channels-last format is several times faster than the other.
    weight : Tensor
        ``[Co, Ci/groups, kh, kw]``.
    bias : Tensor or None
        ``[Co]``.
    geometry : ConvGeometry
        How the kernel slides.
    patch : int
        Side r of a patch of the output, at least 1; if larger than the map, the whole map is one patch.
    filters_input : bool
        Whether the input gradient is filtered as well. It is then far cheaper and far less exact.
    """
    return apply_function(_FilteredConv, x, weight, bias, geometry, patch, filters_input)


class _FilteredConv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: ConvGeometry,
        patch: int,
        filters_input: bool,
    ) -> Tensor:
        pooled = pooled_input(x, geometry, patch) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(weight, pooled)
        ctx.geometry, ctx.patch, ctx.filters_input = geometry, patch, filters_input
        ctx.size = x.shape[2], x.shape[3]
        return geometry.convolve(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, pooled = ctx.saved_tensors
        geometry, size, patch = ctx.geometry, ctx.size, ctx.patch
        of_input = of_weight = of_bias = None
        if not gradient.is_contiguous():
            gradient = gradient.contiguous(memory_format=torch.channels_last)
        sums = patch_sums(gradient, patch)
        if ctx.needs_input_grad[0]:
            of_input = (
                filtered_input_gradient(sums, weight, geometry, size, patch)
                if ctx.filters_input
                else geometry.input_gradient(gradient, weight, size)
            )
        if ctx.needs_input_grad[1]:
            of_weight = filtered_weight_gradient(sums, pooled, weight, geometry, size)
        if ctx.needs_input_grad[2]:
            of_bias = sums.sum((0, 2, 3))
        return of_input, of_weight, of_bias, None, None, None
