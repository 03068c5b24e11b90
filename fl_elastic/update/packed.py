"""Deltas that lie one after the other in one array, so that one pass over it serves many tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PackedDeltas", "reach"]

# Numbers that are still in the processor's cache when they are looked at again.
_PIECE = 1 << 16


class PackedDeltas(dict[str, NDArray[Any]]):
    """Deltas by name, most of them views of one flat array.

    A dict like any other: entries may be changed in place, replaced or taken out. `start` tells which of them still
    lie in the array. Copies, also of pickle, are plain dicts.

    Parameters
    ----------
    flat : array
        Numbers of all tensors as they were written, one after the other.

    Examples
    --------
    >>> deltas = PackedDeltas(np.array([1.0, 2.0, 3.0], np.float32))
    >>> deltas.lay("a", 0, (2, 1))
    >>> deltas.lay("b", 2, ())
    >>> deltas["b"] = np.array(9.0)
    >>> deltas["a"].tolist(), deltas.start("a"), deltas.start("b"), deltas.reach()
    ([[1.0], [2.0]], 0, None, 3.0)
    """

    def __init__(self, flat: NDArray[np.float32]) -> None:
        super().__init__()
        self.flat = flat
        self._views: dict[str, tuple[int, NDArray[Any]]] = {}

    def lay(self, name: str, start: int, shape: tuple[int, ...]) -> None:
        """Enter the tensor whose numbers begin at ``start``."""
        view = self.flat[start : start + math.prod(shape)].reshape(shape)
        self._views[name] = start, view
        self[name] = view

    def start(self, name: str) -> int | None:
        """Return where a delta begins in the array; None if it lies elsewhere."""
        place = self._views.get(name)
        return place[0] if place is not None and self.get(name) is place[1] else None

    def reach(self) -> float:
        """Return the largest absolute number in the array, infinite if one is not a number."""
        return reach(self.flat)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy's views would not be views of its array any more.
        return dict, (dict(self),)


def reach(numbers: NDArray[Any]) -> float:
    """Return the largest absolute number, infinite if one is not a number.

    >>> reach(np.array([1, -2])), reach(np.array([1.0, np.nan])), reach(np.zeros((0, 3)))
    (2.0, inf, 0.0)
    """
    # Least and largest let NaN through, and unlike absolute values need no second array.
    flat = numbers.reshape(-1)
    found = 0.0
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        least, largest = float(np.minimum.reduce(piece)), float(np.maximum.reduce(piece))
        if math.isnan(least) or math.isnan(largest):
            return math.inf
        found = max(found, -least, largest)
    return found
