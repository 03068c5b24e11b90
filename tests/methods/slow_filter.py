"""Gradient filtering by explicit loops over images, patches, channels and taps."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import Tensor

from fl_elastic.ops.geometry import ConvGeometry


def _starts(geometry: ConvGeometry) -> list[int]:
    """Where the first cell begins: behind the margin of a kernel that is padded too little."""
    result = []
    for k, s, p, d in zip(
        geometry.kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True
    ):
        start = 0
        # The centre of the first output's taps must not lie behind the centre of its pixels.
        while start + (s - 1) / 2 < -p + d * (k - 1) / 2:
            start += 1
        result.append(start)
    return result


def _share(geometry: ConvGeometry, size: tuple[int, int], tap: tuple[int, int]) -> float:
    """Share of the outputs whose tap reads a pixel."""
    outputs = geometry.output_size(size)
    reads = 0
    for place in product(range(outputs[0]), range(outputs[1])):
        pixel = [
            place[a] * geometry.stride[a] - geometry.padding[a] + tap[a] * geometry.dilation[a]
            for a in (0, 1)
        ]
        reads += all(0 <= pixel[a] < size[a] for a in (0, 1))
    return reads / (outputs[0] * outputs[1])


def slow_filter(
    x: Tensor, weight: Tensor, gradient: Tensor, geometry: ConvGeometry, patch: int
) -> tuple[Tensor, Tensor]:
    """The filtered weight gradient and the filtered input gradient."""
    size = x.shape[2], x.shape[3]
    if geometry.kernel == (1, 1) and geometry.padding == (0, 0) and geometry.stride != (1, 1):
        rows, columns = geometry.stride
        dense = ConvGeometry((1, 1), groups=geometry.groups)
        of_weight, lattice = slow_filter(x[:, :, ::rows, ::columns], weight, gradient, dense, patch)
        of_input = torch.zeros_like(x)
        of_input[:, :, ::rows, ::columns] = lattice
        return of_weight, of_input
    outputs, stride, start = geometry.output_size(size), geometry.stride, _starts(geometry)
    inputs, weights, gradients = (each.numpy() for each in (x, weight, gradient))
    of_weight, of_input = np.zeros(weight.shape), np.zeros(x.shape)
    rows, columns = weight.shape[0], weight.shape[1]
    grid = [range(-(-outputs[a] // patch)) for a in (0, 1)]
    taps = list(product(range(geometry.kernel[0]), range(geometry.kernel[1])))
    shares = {tap: _share(geometry, size, tap) for tap in taps}
    for image, cell in product(range(x.shape[0]), product(*grid)):
        mine = [slice(cell[a] * patch, (cell[a] + 1) * patch) for a in (0, 1)]
        read = [
            slice(
                min(start[a] + cell[a] * patch * stride[a], size[a]),
                min(start[a] + min((cell[a] + 1) * patch, outputs[a]) * stride[a], size[a]),
            )
            for a in (0, 1)
        ]
        for row, column in product(range(rows), range(columns)):
            channel = row // (rows // geometry.groups) * columns + column
            piece = gradients[image, row, mine[0], mine[1]]
            pixels = inputs[image, channel, read[0], read[1]]
            mean = pixels.mean() if pixels.size else 0.0
            total, each = piece.sum(), piece.mean() / (stride[0] * stride[1])
            for tap in taps:
                place = row, column, *tap
                of_weight[place] += shares[tap] * total * mean
                of_input[image, channel, read[0], read[1]] += shares[tap] * weights[place] * each
    return torch.from_numpy(of_weight), torch.from_numpy(of_input)
