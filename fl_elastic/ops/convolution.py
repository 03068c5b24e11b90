"""Convolutions whose weight is not trained: they keep nothing of their input."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fl_elastic.ops.autograd import apply_function
from fl_elastic.ops.geometry import ConvGeometry

__all__ = ["bias_gradient", "frozen_conv2d"]


def frozen_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    *,
    trains_bias: bool = False,
) -> Tensor:
    """Return a convolution that passes the error gradient on and keeps nothing but its weight.

    Plain PyTorch keeps the input as well, whatever is trained.

    Parameters
    ----------
    x : Tensor
        ``[N, Ci, H, W]``.
    weight : Tensor
        ``[Co, Ci/groups, kh, kw]``; never gets a gradient.
    bias : Tensor or None
        ``[Co]``.
    geometry : ConvGeometry
        How the kernel slides.
    trains_bias : bool
        Whether the bias gets a gradient, if it requires one.
    """
    return apply_function(_FrozenConv, x, weight, bias, geometry, trains_bias)


def bias_gradient(gradient: Tensor) -> Tensor:
    """Return the gradient of a convolution's bias for an output gradient ``[N, Co, H, W]``."""
    return gradient.sum((0, 2, 3))


class _FrozenConv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: ConvGeometry,
        trains_bias: bool,
    ) -> Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(weight)
        ctx.geometry, ctx.size = geometry, (x.shape[2], x.shape[3])
        ctx.needs_bias = trains_bias and ctx.needs_input_grad[2]
        return geometry.convolve(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            (weight,) = ctx.saved_tensors
            of_input = ctx.geometry.input_gradient(gradient, weight, ctx.size)
        if ctx.needs_bias:
            of_bias = bias_gradient(gradient)
        return of_input, None, of_bias, None, None
