"""A part of a tensor, trained or written: one mask per axis, and their outer product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError

Masks: TypeAlias = tuple[NDArray[np.bool_] | None, ...]
"""One entry per axis of a tensor: a mask of the indices in the part; None for all."""
# If fewer numbers are left out, the masks take as many bytes as they save.
_FEWEST_LEFT_OUT = 16
_TRAINED, _NOT_ZERO = "trained", "nonzero"


def outer_mask(masks: Masks) -> NDArray[np.bool_] | None:
    """Return the outer product of ``masks``, of length 1 along axes without a mask; None if there is no mask.

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
    """Return a tensor of shape ``whole`` with ``part`` in its place and zeros elsewhere.

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


@dataclass(frozen=True, eq=False)
class Slices:
    """The part of a tensor that is written; the rest is zero.

    Attributes
    ----------
    masks : tuple
        One entry per axis: a mask of the written indices, or None for all; at least one entry is a mask.
    trained : bool
        Whether this is the trained part of a tensor. Otherwise it has one mask and only saves bytes.
    """

    masks: Masks
    trained: bool = False

    @classmethod
    def of(cls, delta: NDArray[Any]) -> Slices | None:
        """Return the non-zero slices of the axis where most can be left out; None if few numbers can be.

        Examples
        --------
        >>> delta = np.zeros((9, 4))
        >>> delta[:, 1] = 1.0
        >>> Slices.of(delta).masks
        (None, array([False,  True, False, False]))
        >>> Slices.of(np.ones((9, 4))) is None
        True
        """
        if delta.size - np.count_nonzero(delta) < _FEWEST_LEFT_OUT:
            return None
        # Reduce one axis after the other: each step works on a smaller array.
        changed = np.asarray(delta != 0)
        best, best_share = None, 1.0
        for axis in range(delta.ndim):
            kept = np.asarray(changed.reshape(delta.shape[axis], -1).any(axis=1))
            changed = np.asarray(changed.any(axis=0))
            if kept.mean() < best_share:
                best, best_share = (axis, kept), float(kept.mean())
        if best is None or (1 - best_share) * delta.size < _FEWEST_LEFT_OUT:
            return None
        return cls(tuple(best[1] if a == best[0] else None for a in range(delta.ndim)))

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the written part of a tensor of shape ``whole``."""
        return part_shape(self.masks, whole)

    def take(self, delta: NDArray[Any]) -> NDArray[Any]:
        """Return the written part of ``delta``."""
        return take_part(delta, self.masks)

    def put(self, written: NDArray[Any], whole: Sequence[int]) -> NDArray[Any]:
        """Return a tensor of shape ``whole`` with ``written`` in the written part and zeros elsewhere."""
        return put_part(written, self.masks, whole)

    def to_header(self) -> list[Any]:
        """Return it as JSON values: its kind, then axis and mask (bits in hexadecimal) of each masked axis."""
        kind = _TRAINED if self.trained else _NOT_ZERO
        return [kind] + [
            [axis, np.packbits(mask).tobytes().hex()]
            for axis, mask in enumerate(self.masks)
            if mask is not None
        ]

    @classmethod
    def from_header(cls, value: object, whole: Sequence[int]) -> Slices | None:
        """Read the result of `to_header` for a tensor of shape ``whole``; None for None.

        Raises
        ------
        UpdateError
            If the value is not valid for such a tensor.
        """
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < 2 or value[0] not in (_TRAINED, _NOT_ZERO):
            raise UpdateError(f"slices {str(value)[:40]!r} are not a list of a kind and its masks")
        trained = value[0] == _TRAINED
        masks: list[NDArray[np.bool_] | None] = [None] * len(whole)
        last = -1
        for entry in value[1:]:
            axis, text = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
            if type(axis) is not int or not last < axis < len(whole):
                raise UpdateError(
                    f"slices {str(entry)[:40]!r} do not name the next axis of a tensor of {tuple(whole)}"
                )
            masks[axis] = _mask(text, whole[axis])
            last = axis
        if not trained and len(value) != 2:
            raise UpdateError(f"zeros are left out along {len(value) - 1} axes, expected one")
        return cls(tuple(masks), trained)


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
