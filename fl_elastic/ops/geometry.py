"""Geometry of a 2-D convolution: how its kernel slides over the input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class ConvGeometry:
    """Kernel, stride, padding, dilation (rows, columns) and groups of a 2-D convolution that pads zeros.

    Examples
    --------
    >>> ConvGeometry.of(nn.Conv2d(4, 8, 3, stride=2, padding=1)).output_size((7, 8))
    (4, 4)
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @classmethod
    def of(cls, conv: nn.Conv2d) -> ConvGeometry | None:
        """Return the geometry of ``conv``.

        None if it pads with something other than zeros, or unequally on two sides, as ``padding="same"`` does
        for a kernel of even length.
        """
        if conv.padding_mode != "zeros":
            return None
        kernel, dilation = _pair(conv.kernel_size), _pair(conv.dilation)
        if conv.padding == "valid":
            padding = (0, 0)
        elif conv.padding == "same":
            reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            if any(length % 2 for length in reach):
                return None
            padding = (reach[0] // 2, reach[1] // 2)
        else:
            padding = _pair(conv.padding)
        return cls(kernel, _pair(conv.stride), padding, dilation, conv.groups)

    @property
    def skips_pixels(self) -> bool:
        """Whether it is a 1 x 1 kernel with a stride, which never reads some of the pixels."""
        return self.kernel == (1, 1) and self.padding == (0, 0) and self.stride != (1, 1)

    def read_pixels(self, x: Tensor) -> Tensor:
        """Return the pixels of ``x`` ``[N, C, H, W]`` that a 1 x 1 kernel reads, as a view."""
        return x[:, :, :: self.stride[0], :: self.stride[1]]

    def without_stride(self) -> ConvGeometry:
        """Return the same geometry with stride 1."""
        return replace(self, stride=(1, 1))

    def output_size(self, size: Pair) -> Pair:
        """Return the rows and columns of the output for an input of ``size`` rows and columns."""
        return self._output_length(size[0], 0), self._output_length(size[1], 1)

    def _output_length(self, length: int, axis: int) -> int:
        taken = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (length + 2 * self.padding[axis] - taken) // self.stride[axis] + 1

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of ``x`` ``[N, Ci, H, W]`` with ``weight`` ``[Co, Ci/groups, *kernel]``."""
        return functional.conv2d(
            x, weight, bias, self.stride, self.padding, self.dilation, self.groups
        )

    def input_gradient(
        self, gradient: Tensor, weight: Tensor, size: Pair, x: Tensor | None = None
    ) -> Tensor:
        """Return the exact gradient of an input of ``size`` rows and columns, even without the input itself.

        If the input ``x`` is given, torch's own computation is used, which is faster on large images.
        """
        if x is not None:
            return self._backward(gradient, x, weight, self.groups, [True, False, False])[0]
        spare = [
            length + 2 * p - d * (k - 1) - 1 - (outputs - 1) * s
            for length, outputs, k, s, p, d in zip(
                size, gradient.shape[2:], self.kernel, self.stride, self.padding, self.dilation,
                strict=True,
            )
        ]  # fmt: skip
        return functional.conv_transpose2d(
            gradient, weight, None, self.stride, self.padding, spare, self.groups, self.dilation
        )

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, weight: Tensor, groups: int | None = None
    ) -> Tensor:
        """Return the exact gradient of a weight that has the shape and memory format of ``weight``."""
        groups = self.groups if groups is None else groups
        if self.skips_pixels:
            # Pass only the pixels that are read: with a stride and few channels in channels-last format, torch 2.14
            # on a CPU accesses memory outside of the tensor.
            by_pixels = gradient.is_contiguous(memory_format=torch.channels_last)
            like = torch.channels_last if by_pixels else torch.contiguous_format
            x = self.read_pixels(x).contiguous(memory_format=like)
            return self.without_stride().weight_gradient(gradient, x, weight, groups)
        return self._backward(gradient, x, weight, groups, [False, True, False])[1]

    def _backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, groups: int, wanted: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, self.stride, self.padding, self.dilation, False, [0, 0],
            groups, wanted,
        )  # fmt: skip
        return found


def _pair(value: int | str | tuple[int, ...]) -> Pair:
    if isinstance(value, tuple):
        return value[0], value[1]
    return int(value), int(value)
