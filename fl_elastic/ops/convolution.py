"""Convolutions that keep nothing of their input, or only the channels that the trained weights read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_elastic.ops.autograd import apply_function, once_differentiable
from fl_elastic.ops.channels import ChannelBlock, ChannelSubset, take
from fl_elastic.ops.geometry import ConvGeometry


def frozen_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    *,
    trains_bias: bool = False,
) -> Tensor:
    """Return the output of a convolution that keeps only its weight for the backward pass.

    The input gets a gradient, the weight does not. Plain PyTorch always keeps the input as well.

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


def _bias_gradient(gradient: Tensor) -> Tensor:
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
            of_bias = _bias_gradient(gradient)
        return of_input, None, of_bias, None, None


def channel_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry, subset: ChannelSubset
) -> Tensor:
    """Return the output of a convolution in which only the weights of ``subset`` get a gradient.

    The gradient has the shape of the whole weight and is zero elsewhere; input and bias gradient are exact.
    A subset of input channels saves memory and time, one of output channels saves time (and memory if the
    convolution has groups).

    Parameters
    ----------
    x : Tensor
        ``[N, Ci, H, W]``.
    weight : Tensor
        ``[Co, Ci/groups, kh, kw]``.
    bias : Tensor or None
        ``[Co]``.
    geometry : ConvGeometry
        How the kernel slides.
    subset : ChannelSubset
        The trained channels.
    """
    return apply_function(_ChannelConv, x, weight, bias, geometry, subset)


def _shaped(weight: Tensor, block: ChannelBlock) -> Tensor:
    """Return a tensor with the shape and memory format of a block of a weight, without a copy for whole rows."""
    if isinstance(block.outputs, Tensor) and block.columns == slice(None):
        return weight[: len(block.outputs)]
    return weight[block.outputs, block.columns]


class _ChannelConv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: ConvGeometry,
        subset: ChannelSubset,
    ) -> Tensor:
        kept = take(x, subset.kept) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(weight, kept)
        ctx.geometry, ctx.subset, ctx.size = geometry, subset, (x.shape[2], x.shape[3])
        return geometry.convolve(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, kept = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            whole = ctx.subset.kept == slice(None)
            of_input = ctx.geometry.input_gradient(
                gradient, weight, ctx.size, kept if whole else None
            )
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight)
            for block in ctx.subset.blocks:
                part = _shaped(of_weight, block)
                of_weight[block.outputs, block.columns] = ctx.geometry.weight_gradient(
                    take(gradient, block.outputs), take(kept, block.inputs), part, block.groups
                )
        if ctx.needs_input_grad[2]:
            of_bias = _bias_gradient(gradient)
        return of_input, of_weight, of_bias, None, None
