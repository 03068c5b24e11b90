"""Convolutions of every geometry, as a strategy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from fl_elastic.ops.geometry import ConvGeometry


@dataclass(frozen=True)
class ConvCase:
    """A convolution, its tensors in float64, and an output gradient."""

    geometry: ConvGeometry
    x: Tensor
    weight: Tensor
    bias: Tensor
    gradient: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the input."""
        return self.x.shape[2], self.x.shape[3]

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of torch."""
        return self.geometry.convolve(x, weight, bias)


def conv_case(
    geometry: ConvGeometry,
    size: tuple[int, int] = (8, 8),
    batch: int = 2,
    channels: tuple[int, int] = (4, 6),
    *,
    seed: int = 0,
    order: torch.memory_format = torch.channels_last,
) -> ConvCase:
    """A case with random tensors; ``channels`` are per group."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs, outputs = (count * geometry.groups for count in channels)
    return ConvCase(
        geometry,
        random(batch, inputs, *size).contiguous(memory_format=order),
        random(outputs, channels[0], *geometry.kernel),
        random(outputs),
        random(batch, outputs, *geometry.output_size(size)).contiguous(memory_format=order),
    )


@st.composite
def conv_cases(draw: st.DrawFn) -> ConvCase:
    """Any stride, padding, dilation, kernel and grouping on maps of odd and even sides."""

    def pair(values: list[int]) -> tuple[int, int]:
        return draw(st.sampled_from(values)), draw(st.sampled_from(values))

    groups, channels = draw(
        st.sampled_from(
            [(1, (3, 5)), (1, (4, 2)), (5, (1, 1)), (4, (1, 2)), (2, (3, 2)), (3, (2, 4))]
        )
    )
    geometry = ConvGeometry(
        pair([1, 2, 3, 5]), pair([1, 2, 3]), pair([0, 1, 2]), pair([1, 2]), groups
    )
    least = [
        max(1, d * (k - 1) + 1 - 2 * p)
        for k, p, d in zip(geometry.kernel, geometry.padding, geometry.dilation, strict=True)
    ]
    size = least[0] + draw(st.integers(0, 7)), least[1] + draw(st.integers(0, 7))
    order = draw(st.sampled_from([torch.channels_last, torch.contiguous_format]))
    return conv_case(
        geometry,
        size,
        draw(st.integers(1, 3)),
        channels,
        seed=draw(st.integers(0, 99)),
        order=order,
    )
