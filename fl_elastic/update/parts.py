"""The part of a tensor that was trained: one mask per axis, and their outer product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError

__all__ = [
    "Masks",
    "masks_from_header",
    "masks_to_header",
    "outer_mask",
    "part_shape",
    "put_part",
    "take_part",
]

Masks: TypeAlias = tuple[NDArray[np.bool_] | None, ...]
"""One entry per axis of a tensor: which indices along it belong to the part; None for all."""


def outer_mask(masks: Masks) -> NDArray[np.bool_] | None:
    """Return the outer product of ``masks``, of length 1 along axes without a mask; None without any.

    Examples
    --------
    >>> outer_mask((np.array([True, False, True]), None)).tolist()
    [[True], [False], [True]]
    >>> outer_mask((None, None)) is None
    True
    """
    product: NDArray[np.bool_] | None = None
    for axis, mask in enumerate(masks):
        if mask is not None:
            placed = mask.reshape([-1 if a == axis else 1 for a in range(len(masks))])
            product = placed if product is None else product & placed
    return product


def part_shape(masks: Masks, whole: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the part of a tensor of shape ``whole``."""
    return tuple(
        count if mask is None else int(np.count_nonzero(mask))
        for count, mask in zip(whole, masks, strict=True)
    )


def take_part(array: NDArray[Any], masks: Masks) -> NDArray[Any]:
    """Return the part of ``array`` as a contiguous array."""
    for axis, mask in enumerate(masks):
        if mask is not None:
            array = np.compress(mask, array, axis=axis)
    return np.ascontiguousarray(array)


def put_part(part: NDArray[Any], masks: Masks, whole: Sequence[int]) -> NDArray[Any]:
    """Return a tensor of shape ``whole`` that holds ``part``, and zeros elsewhere.

    Examples
    --------
    >>> masks = (np.array([True, False]), np.array([False, True, True]))
    >>> put_part(np.array([[1, 2]]), masks, (2, 3)).tolist()
    [[0, 1, 2], [0, 0, 0]]
    """
    array = np.zeros(tuple(whole), dtype=part.dtype)
    masked = [axis for axis, mask in enumerate(masks) if mask is not None]
    if len(masked) == 1:
        # One index array among slices is twice as fast as a grid of index arrays.
        array[(*(slice(None),) * masked[0], masks[masked[0]])] = part
    else:
        places = [
            np.arange(n) if mask is None else np.flatnonzero(mask)
            for n, mask in zip(whole, masks, strict=True)
        ]
        array[np.ix_(*places)] = part
    return array


def masks_to_header(masks: Masks) -> list[Any]:
    """Return masks as JSON values: axis and mask (bits in hexadecimal) of each masked axis."""
    return [
        [axis, np.packbits(mask).tobytes().hex()]
        for axis, mask in enumerate(masks)
        if mask is not None
    ]


def masks_from_header(value: object, whole: Sequence[int]) -> Masks | None:
    """Read what `masks_to_header` gave for a tensor of shape ``whole``; None for None.

    Raises
    ------
    UpdateError
        If it says nothing sensible about such a tensor.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise UpdateError(f"a part {str(value)[:40]!r} is no list of masks")
    masks: list[NDArray[np.bool_] | None] = [None] * len(whole)
    last = -1
    for entry in value:
        axis, text = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if type(axis) is not int or not last < axis < len(whole):
            raise UpdateError(
                f"a part {str(entry)[:40]!r} does not name the next axis of a tensor of {tuple(whole)}"
            )
        masks[axis] = _mask(text, whole[axis])
        last = axis
    return tuple(masks)


def _mask(text: object, count: int) -> NDArray[np.bool_]:
    """Read one mask of ``count`` bits."""
    if not isinstance(text, str) or len(text) != 2 * -(-count // 8):
        raise UpdateError(f"mask {str(text)[:40]!r} does not have a bit for each of {count} slices")
    try:
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))
    except ValueError:
        raise UpdateError(f"mask {text[:40]!r} is not hexadecimal") from None
    if len(bits) < count or bits[count:].any():
        raise UpdateError(f"mask {text[:40]!r} has bits beyond its {count} slices")
    return bits[:count].astype(bool)
