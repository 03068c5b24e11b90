"""ReLU, ReLU6 and Hardswish that keep a bit per element instead of a full tensor, where that is exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fl_elastic.ops.autograd import apply_function, once_differentiable
from fl_elastic.ops.packed_masks import Layout, gate, pack_bits, unpack_bits

_SAMPLE = 4096
_WORTH_COMPRESSING = 0.25


def relu(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Return ``torch.nn.functional.relu(x)``, with the same gradient, keeping 1 bit per element."""
    return apply_function(_Rectifier, x, False, inplace)


def relu6(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Return ``torch.nn.functional.relu6(x)``, with the same gradient, keeping 1 bit per element."""
    return apply_function(_Rectifier, x, True, inplace)


def hardswish(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Return ``torch.nn.functional.hardswish(x)``, with the same gradient, keeping no more than ``x``.

    Between -3 and 3 the gradient is (2x + 3) / 6, which depends on x. So x is kept there, and two bits per element
    tell on which side the other elements lie. If less than a quarter of a sample lies outside, as is usual after a
    batch norm, all of x is kept instead, and nothing is saved compared with plain PyTorch.
    """
    return apply_function(_Hardswish, x, inplace)


def open_units(y: Tensor, *, capped: bool) -> Tensor:
    """Return a mask of the elements at which a rectifier with output ``y`` lets the gradient through.

    With ``capped``, the rectifier is also closed from 6 on.
    """
    # Conversion to bool is far faster than comparing.
    opened = y.bool()
    return opened.bitwise_and_((6 - y).bool()) if capped else opened


class _Rectifier(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, capped: bool, inplace: bool) -> Tensor:
        clamp = functional.relu6 if capped else functional.relu
        y = clamp(x, inplace=inplace)
        if inplace:
            ctx.mark_dirty(x)
        if not ctx.needs_input_grad[0]:
            return y
        # From the output, because an in-place operation has overwritten its input.
        opened = open_units(y, capped=capped)
        ctx.layout = Layout.of(opened)
        ctx.save_for_backward(pack_bits(opened))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (bits,) = ctx.saved_tensors
        return gate(gradient, bits, ctx.layout), None, None


def _is_mostly_flat(x: Tensor) -> bool:
    """Return whether enough of a sample of ``x`` lies outside -3..3 to make up for two bits per element."""
    sample = Layout.of(x).flat(x)[:_SAMPLE]
    return bool((sample.abs() > 3).float().mean() > _WORTH_COMPRESSING)


class _Hardswish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        ctx.compressed = ctx.needs_input_grad[0] and _is_mostly_flat(x)
        if ctx.compressed:
            outside = x.abs() > 3
            ctx.layout = Layout.of(outside)
            inner = ctx.layout.flat(x)[~ctx.layout.flat(outside)]
            ctx.save_for_backward(pack_bits(outside), pack_bits(x > 0), inner)
        elif ctx.needs_input_grad[0]:
            ctx.save_for_backward(x.clone() if inplace else x)
        y = functional.hardswish(x, inplace=inplace)
        if inplace:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.compressed:
            outside, positive, inner = ctx.saved_tensors
            # All points on the same outer side have the same gradient.
            x = unpack_bits(positive, ctx.layout).to(gradient.dtype).mul_(8).sub_(4)
            flat = ctx.layout.flat(x)
            flat[~ctx.layout.flat(unpack_bits(outside, ctx.layout))] = inner
        else:
            (x,) = ctx.saved_tensors
        return torch.ops.aten.hardswish_backward(gradient, x), None
