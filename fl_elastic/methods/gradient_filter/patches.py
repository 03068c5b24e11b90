"""Patches of a convolution's output, and the cells of its input that they read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from fl_elastic.ops.geometry import ConvGeometry, Pair


@dataclass(frozen=True)
class Cells:
    """Cells along one axis of the input.

    Cell i covers ``[start + i * side, start + (i + 1) * side)``, cut at ``stop``.

    Attributes
    ----------
    start, stop : int
        The part of the axis that the outputs read; without padding, ``start`` lies after the margin of the kernel.
    side : int
        Length of a cell: patch side times stride.
    count : int
        Number of patches of the output; cells from ``stop`` on are empty.
    length : int
        Length of the axis.
    """

    start: int
    stop: int
    side: int
    count: int
    length: int

    @classmethod
    def along(cls, axis: int, geometry: ConvGeometry, size: Pair, patch: int) -> Cells:
        """Return the cells along rows (axis 0) or columns (1) of an input of ``size``."""
        outputs, stride = geometry.output_size(size)[axis], geometry.stride[axis]
        reach = geometry.dilation[axis] * (geometry.kernel[axis] - 1)
        # Twice the distance from the centre of the pixels that an output strides over to the centre of its taps.
        lag = reach - 2 * geometry.padding[axis] - (stride - 1)
        start = max(0, -(-lag // 2))
        side = patch * stride
        stop = min(start + outputs * stride, size[axis])
        return cls(start, stop, side, -(-outputs // patch), size[axis])

    @property
    def is_whole(self) -> bool:
        """Whether every position of the axis lies in a cell."""
        return self.start == 0 and self.stop == self.length

    @property
    def is_even(self) -> bool:
        """Whether all cells have the same length."""
        return self.stop - self.start == self.count * self.side

    def places(self, device: torch.device) -> Tensor:
        """Return the cell of every position from ``start`` to ``stop``."""
        return torch.arange(self.stop - self.start, device=device) // self.side


@dataclass(frozen=True)
class CellGrid:
    """The cells of an input, by rows and columns."""

    rows: Cells
    columns: Cells

    @classmethod
    def of(cls, geometry: ConvGeometry, size: Pair, patch: int) -> CellGrid:
        """Return the grid of cells, in an input of ``size``, that output patches of side ``patch`` read."""
        return cls(*(Cells.along(axis, geometry, size, patch) for axis in (0, 1)))

    def means(self, x: Tensor) -> Tensor:
        """Return the mean over each cell of ``x`` ``[N, C, H, W]``; zero for an empty cell."""
        rows, columns = self.rows, self.columns
        if not (rows.is_whole and columns.is_whole):
            x = x[:, :, rows.start : rows.stop, columns.start : columns.stop]
        pooled = functional.avg_pool2d(x, (rows.side, columns.side), ceil_mode=True)
        missing = rows.count - pooled.shape[2], columns.count - pooled.shape[3]
        return functional.pad(pooled, (0, missing[1], 0, missing[0])) if any(missing) else pooled

    def fill(self, values: Tensor) -> Tensor:
        """Return a map with each of ``values`` ``[N, C, rows, columns]`` in its cell, and zero elsewhere."""
        rows, columns = self.rows, self.columns
        inside = rows.stop - rows.start, columns.stop - columns.start
        if rows.is_even and columns.is_even:
            filled = functional.interpolate(values, size=inside, mode="nearest-exact")
        else:
            filled = values.index_select(3, columns.places(values.device))
            filled = filled.index_select(2, rows.places(values.device))
        if rows.is_whole and columns.is_whole:
            return filled
        whole = filled.new_zeros((*values.shape[:2], rows.length, columns.length))
        whole = whole.contiguous(memory_format=torch.channels_last)
        whole[:, :, rows.start : rows.stop, columns.start : columns.stop] = filled
        return whole


def patch_sums(gradient: Tensor, patch: int) -> Tensor:
    """Return the sums of ``gradient`` over r x r patches.

    Parameters
    ----------
    gradient : Tensor
        ``[N, Co, Ho, Wo]``.
    patch : int
        Side r of a patch.

    Returns
    -------
    Tensor
        ``[N, Co, ceil(Ho / r), ceil(Wo / r)]``; the last patches may be cut.
    """
    return functional.avg_pool2d(gradient, patch, ceil_mode=True, divisor_override=1)


def patch_counts(size: Pair, patch: int, like: Tensor) -> Tensor:
    """Return the number of pixels in each patch of a map of ``size``, as ``[ceil(Ho / r), ceil(Wo / r)]``."""
    return _patch_counts(size, patch).to(like)


@lru_cache(maxsize=256)
def _patch_counts(size: Pair, patch: int) -> Tensor:
    rows, columns = ((length - torch.arange(0, length, patch)).clamp(max=patch) for length in size)
    return torch.outer(rows, columns)
