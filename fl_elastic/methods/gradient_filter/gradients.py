"""Gradient filtering: the gradients of a convolution from patch means of its input and output gradient.

Notation: output ``[N, Co, Ho, Wo]``, stride s, patches of r x r outputs. Each patch reads a cell of (r s) x (r s)
inputs, and only the mean of the cell is kept. With S the sum of the output gradient over a patch, g its mean, and x
that of the input cell, the rule is::

    dW[o, c, u, v] = m[u, v] * sum(S[o] * x[c])
    dx[c] = fill(sum_o(g[o] * sum_uv(m[u, v] * W[o, c, u, v])) / s^2)

where ``m[u, v]`` is the share of the outputs whose tap (u, v) reads a pixel rather than padding.

Source: Yang, Li and Marculescu, CVPR 2023, with three corrections. Both gradients carry ``1 / s^2`` (that of dW is
in the mean over the cell), because an input pixel meets only one in s^2 of the taps. The tap shares m make a 1 x 1
map exact. Patches and cells are aligned at the top left and cut off at the end, and means are over valid pixels. If
the kernel is not padded, the margin that only outer taps read lies in no cell.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from fl_elastic.methods.gradient_filter.patches import CellGrid, patch_counts
from fl_elastic.ops.geometry import ConvGeometry, Pair


def pooled_input(x: Tensor, geometry: ConvGeometry, patch: int) -> Tensor:
    """Return the means of ``x`` over the cells that the patches of the output read.

    Parameters
    ----------
    x : Tensor
        ``[N, Ci, H, W]``. In channels-last format this costs about as much as copying it, else ten times that.
    geometry : ConvGeometry
        How the kernel slides. For a 1 x 1 kernel with a stride, means are over the pixels that it reads.
    patch : int
        Side r of a patch.

    Returns
    -------
    Tensor
        ``[N, Ci, ceil(Ho / r), ceil(Wo / r)]``.
    """
    if geometry.skips_pixels:
        x = geometry.read_pixels(x)
        geometry = geometry.without_stride()
    return CellGrid.of(geometry, (x.shape[2], x.shape[3]), patch).means(x)


def tap_shares(geometry: ConvGeometry, size: Pair, like: Tensor) -> Tensor:
    """Return m: for each tap of the kernel, the share of the outputs for which it reads a pixel, ``[kh, kw]``.

    Parameters
    ----------
    geometry : ConvGeometry
        How the kernel slides.
    size : pair of int
        Rows and columns of the input.
    like : Tensor
        Gives type and device.
    """
    return _tap_shares(geometry, size).to(like)


@lru_cache(maxsize=256)
def _tap_shares(geometry: ConvGeometry, size: Pair) -> Tensor:
    shares = []
    for axis, outputs in enumerate(geometry.output_size(size)):
        place = torch.arange(outputs).unsqueeze(1) * geometry.stride[axis]
        place = place + torch.arange(geometry.kernel[axis]) * geometry.dilation[axis]
        place -= geometry.padding[axis]
        shares.append(((place >= 0) & (place < size[axis])).double().mean(dim=0))
    return torch.outer(shares[0], shares[1])


def filtered_weight_gradient(
    sums: Tensor, pooled: Tensor, weight: Tensor, geometry: ConvGeometry, size: Pair
) -> Tensor:
    """Return the filtered gradient of ``weight``, in its shape and memory format.

    Parameters
    ----------
    sums : Tensor
        Patch sums S, ``[N, Co, rows, columns]``.
    pooled : Tensor
        Result of `pooled_input`, ``[N, Ci, rows, columns]``.
    weight : Tensor
        ``[Co, Ci/groups, kh, kw]``; only its shape and memory format are used.
    geometry : ConvGeometry
        How the kernel slides.
    size : pair of int
        Rows and columns of the input.
    """
    groups = geometry.groups
    outputs, inputs = weight.shape[:2]
    of_sums, of_pooled = _as_rows(sums), _as_rows(pooled)
    if groups == 1:
        product = of_sums.t() @ of_pooled
    else:
        by_group = of_sums.view(-1, groups, outputs // groups)
        if inputs == 1:
            product = (by_group * of_pooled.unsqueeze(2)).sum(dim=0)
        else:
            means = of_pooled.view(-1, groups, inputs)
            product = torch.bmm(by_group.permute(1, 2, 0), means.transpose(0, 1))
    product = product.reshape(outputs, inputs, 1, 1)
    shares = tap_shares(geometry, size, product)
    return torch.mul(product, shares, out=torch.empty_like(weight))


def filtered_input_gradient(
    sums: Tensor, weight: Tensor, geometry: ConvGeometry, size: Pair, patch: int
) -> Tensor:
    """Return the filtered gradient ``[N, Ci, H, W]`` of an input of ``size`` rows and columns.

    Parameters
    ----------
    sums : Tensor
        S, ``[N, Co, rows, columns]``.
    weight : Tensor
        ``[Co, Ci/groups, kh, kw]``.
    geometry : ConvGeometry
        How the kernel slides.
    size : pair of int
        Rows and columns of the input.
    patch : int
        Side r of a patch.
    """
    on_grid = _gradient_of_cells(sums, weight, geometry, size, patch)
    if not geometry.skips_pixels:
        return CellGrid.of(geometry, size, patch).fill(on_grid)
    outputs = geometry.output_size(size)
    lattice = CellGrid.of(geometry.without_stride(), outputs, patch).fill(on_grid)
    whole = lattice.new_zeros((*lattice.shape[:2], *size))
    whole = whole.contiguous(memory_format=torch.channels_last)
    geometry.read_pixels(whole).copy_(lattice)
    return whole


def _gradient_of_cells(
    sums: Tensor, weight: Tensor, geometry: ConvGeometry, size: Pair, patch: int
) -> Tensor:
    """Return the value of the filtered input gradient in each cell, ``[N, Ci, rows, columns]``."""
    groups = geometry.groups
    outputs = geometry.output_size(size)
    columns = weight.shape[1]
    taps = (weight * tap_shares(geometry, size, weight)).sum((2, 3))
    if not geometry.skips_pixels:
        taps /= math.prod(geometry.stride)
    of_sums = _as_rows(sums)
    if groups == 1:
        product = of_sums @ taps
    else:
        by_group = of_sums.view(of_sums.shape[0], groups, -1)
        taps = taps.view(groups, -1, columns)
        if columns == 1:
            product = (by_group * taps.squeeze(2)).sum(dim=2)
        else:
            product = torch.bmm(by_group.transpose(0, 1), taps).transpose(0, 1)
    n, _, rows_, columns_ = sums.shape
    result = product.reshape(n, rows_, columns_, -1).permute(0, 3, 1, 2)
    return result / patch_counts(outputs, patch, result)


def _as_rows(maps: Tensor) -> Tensor:
    """Return ``[N, C, rows, columns]`` as ``[N * rows * columns, C]``; a view in channels-last format."""
    return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
