"""Max pooling that keeps one byte per output: which tap of its window was the largest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fl_elastic.ops.autograd import apply_function, once_differentiable
from fl_elastic.ops.geometry import Pair

MOST_TAPS = 256
MOST_PIXELS = 1 << 21


def max_pool2d(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return ``torch.nn.functional.max_pool2d``, with the same gradient, keeping 1 byte per output.

    Plain PyTorch keeps the input and an index of eight bytes per output.

    Parameters
    ----------
    x : Tensor
        ``[N, C, H, W]``, with fewer than `MOST_PIXELS` pixels in a map.
    kernel, stride, padding : pair of int
        Rows and columns; a window has at most `MOST_TAPS` taps.
    """
    return apply_function(_MaxPool, x, kernel, stride, padding)


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        if not ctx.needs_input_grad[0]:
            return functional.max_pool2d(x, kernel, stride, padding)
        y, index = functional.max_pool2d(x, kernel, stride, padding, return_indices=True)
        ctx.window = kernel, stride, padding
        ctx.input_like = x.shape, _memory_format(x)
        # An index is row * width + column in the input; a tap is the position within its own window.
        width = x.shape[3]
        place = index.int()
        del index
        top, left = _window_starts(y, stride, padding)
        tap = (_quotient(place, width) - top).mul_(kernel[1] - width)
        tap += place
        tap -= top * width + left
        ctx.save_for_backward(tap.to(torch.uint8))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (taps,) = ctx.saved_tensors
        kernel, stride, padding = ctx.window
        shape, memory_format = ctx.input_like
        top, left = _window_starts(taps, stride, padding)
        place = _quotient(taps, kernel[1]).mul_(shape[3] - kernel[1])
        place += taps
        place += top * shape[3] + left
        place = place.long()
        # Only the shape and memory format of the input are used; memory that is never written takes no pages.
        stand_in = torch.empty(
            shape, dtype=gradient.dtype, device=gradient.device, memory_format=memory_format
        )
        of_input: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient.contiguous(memory_format=memory_format),
            stand_in, kernel, stride, padding, (1, 1), False, place,
        )  # fmt: skip
        return of_input, None, None, None


def _quotient(numbers: Tensor, divisor: int) -> Tensor:
    """Return integers below `MOST_PIXELS` divided and rounded down; floats make this ten times faster."""
    return numbers.float().add_(0.5).mul_(1 / divisor).int()


def _window_starts(output: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """Return the first row and column of each output's window, shaped to broadcast; negative inside padding."""
    top, left = (
        torch.arange(length, device=output.device, dtype=torch.int32) * stride[axis] - padding[axis]
        for axis, length in enumerate(output.shape[2:])
    )
    return top.view(-1, 1), left


def _memory_format(x: Tensor) -> torch.memory_format:
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format
