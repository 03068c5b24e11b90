"""The part of a weight that a subset of channels covers, and the part of the input that its gradient needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from fl_elastic.errors import PlanError
from fl_elastic.groups.mode import Axis

Index: TypeAlias = "slice | Tensor"


@dataclass(frozen=True)
class ChannelBlock:
    """A part of a weight gradient that the backward pass of one ordinary convolution computes.

    Attributes
    ----------
    inputs : slice or Tensor
        Input channels, as indices into the kept ones.
    outputs : slice or Tensor
        Rows of the weight: channels of the output.
    columns : slice or Tensor
        Columns of the weight, its second dimension.
    groups : int
        Groups of the convolution of this part.
    """

    inputs: Index
    outputs: Index
    columns: Index
    groups: int = 1


@dataclass(frozen=True)
class ChannelSubset:
    """The trained channels of a convolution.

    Attributes
    ----------
    kept : slice or Tensor
        Input channels to keep for the backward pass.
    blocks : tuple of ChannelBlock
        Parts of the weight gradient to compute; the rest is zero.
    """

    kept: Index
    blocks: tuple[ChannelBlock, ...]

    @classmethod
    def of(
        cls, channels: Sequence[int], axis: Axis, weight_shape: Sequence[int], groups: int
    ) -> ChannelSubset:
        """Return the subset of ``channels`` of the input or of the output of a convolution.

        In a grouped convolution only groups with a selected channel are computed. A depthwise convolution has the
        same channels on both sides, so both axes keep and train the same.

        Raises
        ------
        PlanError
            If there are no channels, or one of them does not exist or is listed twice.
        """
        rows, columns = weight_shape[0], weight_shape[1]
        count = columns * groups if axis == "in" else rows
        chosen = checked_channels(channels, count)
        if groups == 1:
            index = _index(chosen)
            everything = slice(None)
            if axis == "in":
                return cls(index, (ChannelBlock(everything, everything, index),))
            return cls(everything, (ChannelBlock(everything, index, everything),))
        if columns == 1:
            return cls._depthwise(chosen, axis, rows // groups)
        return cls._grouped(chosen, axis, rows // groups, columns)

    @classmethod
    def _depthwise(cls, chosen: list[int], axis: Axis, multiplier: int) -> ChannelSubset:
        if axis == "in" or multiplier == 1:
            outputs = [c * multiplier + m for c in chosen for m in range(multiplier)]
            block = ChannelBlock(slice(None), _index(outputs), slice(None), len(chosen))
            return cls(_index(chosen), (block,))
        # One block per input channel, because a channel may have only some of its outputs selected.
        inputs = sorted({c // multiplier for c in chosen})
        blocks = tuple(
            ChannelBlock(
                slice(place, place + 1),
                _index([c for c in chosen if c // multiplier == channel]),
                slice(None),
            )
            for place, channel in enumerate(inputs)
        )
        return cls(_index(inputs), blocks)

    @classmethod
    def _grouped(cls, chosen: list[int], axis: Axis, rows: int, columns: int) -> ChannelSubset:
        blocks: list[ChannelBlock] = []
        kept: list[int] = []
        width = columns if axis == "in" else rows
        for group in sorted({c // width for c in chosen}):
            own = [c for c in chosen if c // width == group]
            if axis == "in":
                needed = own
                outputs: Index = slice(group * rows, (group + 1) * rows)
                inner = _index([c - group * columns for c in own])
            else:
                needed = list(range(group * columns, (group + 1) * columns))
                outputs, inner = _index(own), slice(None)
            blocks.append(ChannelBlock(slice(len(kept), len(kept) + len(needed)), outputs, inner))
            kept += needed
        return cls(_index(kept), tuple(blocks))


def checked_channels(channels: Sequence[int], count: int) -> list[int]:
    """Return the channels sorted; raise PlanError unless they are distinct and in 0..count-1."""
    chosen = sorted(channels)
    if not chosen:
        raise PlanError(f"no channels are listed, name at least one of 0..{count - 1}")
    for channel in (chosen[0], chosen[-1]):
        if not 0 <= channel < count:
            raise PlanError(f"channel {channel} does not exist, use 0..{count - 1}")
    for one, next_one in pairwise(chosen):
        if one == next_one:
            raise PlanError(f"channel {one} is listed twice, list each of 0..{count - 1} once")
    return chosen


def _index(chosen: list[int]) -> Index:
    """Return a slice if the channels are contiguous, because slicing is several times faster than gathering."""
    if chosen[-1] - chosen[0] + 1 == len(chosen):
        return slice(chosen[0], chosen[-1] + 1)
    return torch.tensor(chosen)


def take(x: Tensor, index: Index) -> Tensor:
    """Return the channels ``index`` of ``x`` ``[N, C, H, W]``, dense and in the memory format of ``x``."""
    if isinstance(index, slice):
        picked = x[:, index]
        return picked if picked.shape[1] == x.shape[1] else picked.clone()
    index = index.to(x.device)
    if x.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(-1, c).index_select(1, index)
        return rows.view(n, h, w, -1).permute(0, 3, 1, 2)
    return x.index_select(1, index)
