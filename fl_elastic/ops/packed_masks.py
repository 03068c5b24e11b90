"""Masks at one bit per element: packed when the forward pass saves them, unpacked in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Multiplying eight bytes of 0 or 1, read as one integer, by this number gathers them in its top byte.
_GATHER = 0x0102040810204080
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """Shape and strides of a dense tensor, to restore it from a vector in storage order."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of ``tensor``, or that of a dense copy if ``tensor`` has gaps."""
        dense = tensor if _is_dense(tensor) else torch.empty_like(tensor, device="meta")
        return cls(tuple(dense.shape), tuple(dense.stride()))

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements of ``tensor`` in this storage order; copies only if its strides differ."""
        if tensor.stride() != self.stride:
            tensor = tensor.new_empty_strided(self.shape, self.stride).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def view(self, flat: Tensor) -> Tensor:
        """Return ``flat``, a vector in this storage order, in this shape."""
        return flat.as_strided(self.shape, self.stride)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def pack_bits(mask: Tensor) -> Tensor:
    """Return a boolean tensor as bits, in its own storage order.

    Parameters
    ----------
    mask : Tensor
        Boolean, of any shape and memory format; a channels-last mask is not copied to another format.

    Returns
    -------
    Tensor
        Vector of uint8 with ``ceil(mask.numel() / 8)`` elements.

    Examples
    --------
    >>> mask = torch.tensor([[True, False, True], [True, True, False]])
    >>> bits = pack_bits(mask)
    >>> bits.shape, torch.equal(unpack_bits(bits, Layout.of(mask)), mask)
    (torch.Size([1]), True)
    """
    flat = Layout.of(mask).flat(mask)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    return ((flat.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack_bits(bits: Tensor, layout: Layout) -> Tensor:
    """Return the boolean tensor that `pack_bits` packed; ``layout`` is the layout of that mask."""
    return layout.view(_bytes(bits, layout)).view(torch.bool)


def gate(gradient: Tensor, bits: Tensor, layout: Layout) -> Tensor:
    """Return ``gradient`` where a bit is set and zero elsewhere.

    Parameters
    ----------
    gradient : Tensor
        Floating point, of shape ``layout.shape`` and any strides.
    bits : Tensor
        Packed mask.
    layout : Layout
        Layout of the packed mask, which becomes that of the result.

    Notes
    -----
    The mask is applied to bit patterns: numbers that pass are unchanged to the last bit, and masked
    ones become zero even if infinite. On a CPU this is several times faster than ``torch.where``.
    """
    whole = _WHOLE[gradient.element_size()]
    # As a signed byte 255 is -1, which widens to a pattern of ones only.
    opened = _bytes(bits, layout, set_byte=255).view(torch.int8).to(whole)
    opened.bitwise_and_(layout.flat(gradient).view(whole))
    return layout.view(opened.view(gradient.dtype))


def _bytes(bits: Tensor, layout: Layout, set_byte: int = 1) -> Tensor:
    """Return one byte per element in storage order: ``set_byte`` if its bit is set, else 0."""
    eights = _byte_table(bits.device, set_byte).index_select(0, bits.int())
    count = 1
    for size in layout.shape:
        count *= size
    return eights.view(torch.uint8)[:count]


@lru_cache(maxsize=16)
def _byte_table(device: torch.device, set_byte: int) -> Tensor:
    """Return, for each value of a byte of bits, the eight bytes that it stands for, as one integer."""
    # The first element of eight is the lowest bit, because `_GATHER` puts it there.
    rows = torch.arange(256).unsqueeze(1) >> torch.arange(8)
    return ((rows & 1) * set_byte).to(torch.uint8).view(torch.int64).flatten().to(device)
