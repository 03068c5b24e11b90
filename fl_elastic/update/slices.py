"""Leave out the channels of a delta that are wholly zero: those of a layer that was trained in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError

__all__ = ["Slices"]

_AXES = (0, 1)
# Below this many numbers what says so takes as many bytes.
_FEWEST_LEFT_OUT = 16


@dataclass(frozen=True, eq=False)
class Slices:
    """Which slices of a tensor are written.

    Attributes
    ----------
    axis : {0, 1}
        Output or input channels.
    kept : array of bool
        Slices along ``axis`` that are written; the others are zero.
    """

    axis: int
    kept: NDArray[np.bool_]

    @classmethod
    def of(cls, delta: NDArray[Any]) -> Slices | None:
        """Return the slices of the axis that leaves out most; None if that would save next to nothing.

        Examples
        --------
        >>> delta = np.zeros((9, 4))
        >>> delta[:, 1] = 1.0
        >>> found = Slices.of(delta)
        >>> found.axis, found.kept.tolist()
        (1, [False, True, False, False])
        >>> Slices.of(np.ones((9, 4))) is None
        True
        """
        best: Slices | None = None
        for axis in _AXES[: delta.ndim] if delta.ndim > 1 else ():
            others = tuple(a for a in range(delta.ndim) if a != axis)
            found = cls(axis, np.asarray((delta != 0).any(axis=others)))
            if best is None or found.share < best.share:
                best = found
        if best is None or (1 - best.share) * delta.size < _FEWEST_LEFT_OUT:
            return None
        return best

    @property
    def share(self) -> float:
        """Share of the slices that is written."""
        return float(self.kept.mean()) if self.kept.size else 1.0

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what is written of a tensor of shape ``whole``."""
        return tuple(int(self.kept.sum()) if a == self.axis else n for a, n in enumerate(whole))

    def take(self, delta: NDArray[Any]) -> NDArray[Any]:
        """Return the written part of ``delta``."""
        return np.ascontiguousarray(np.compress(self.kept, delta, axis=self.axis))

    def put(self, written: NDArray[Any], whole: Sequence[int]) -> NDArray[Any]:
        """Return the tensor of shape ``whole`` whose slices were ``written``."""
        delta = np.zeros(tuple(whole), dtype=written.dtype)
        place = tuple(self.kept if a == self.axis else slice(None) for a in range(len(whole)))
        delta[place] = written
        return delta

    def to_header(self) -> list[Any]:
        """Return it as JSON values: the axis, and the kept slices as bits in hexadecimal."""
        return [self.axis, np.packbits(self.kept).tobytes().hex()]

    @classmethod
    def from_header(cls, value: object, whole: Sequence[int]) -> Slices | None:
        """Read what `to_header` gave for a tensor of shape ``whole``; None for None.

        Raises
        ------
        UpdateError
            If it says nothing sensible about such a tensor.
        """
        if value is None:
            return None
        axis, text = value if isinstance(value, list) and len(value) == 2 else (None, None)
        if type(axis) is not int or axis not in _AXES or axis >= len(whole) or len(whole) < 2:
            raise UpdateError(
                f"slices {str(value)[:40]!r} do not name an axis of a tensor of {whole}"
            )
        try:
            bits = np.frombuffer(bytes.fromhex(str(text)), dtype=np.uint8)
        except ValueError:
            raise UpdateError(f"slices {str(value)[:40]!r} are not hexadecimal") from None
        if len(bits) != -(-whole[axis] // 8):
            raise UpdateError(f"slices have {8 * len(bits)} bits for {whole[axis]} channels")
        return cls(axis, np.unpackbits(bits)[: whole[axis]].astype(bool))
