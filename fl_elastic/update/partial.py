"""A partial update: the deltas of the tensors that one client trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.parts import Masks, outer_mask

# Larger than any number whose square underflows in single precision.
_TINY = 1e-15
# Count of numbers that stay in the processor's cache for a second pass.
_PIECE = 1 << 16


@dataclass(frozen=True, eq=False)
class PartialUpdate:
    """Result of one client's training in one round.

    Attributes
    ----------
    deltas : dict of str to ndarray
        Change of each trained tensor, and of each running statistic that training updated.
    steps : dict of str to int
        For each delta, the number of local steps in which the tensor was trained (or the statistic updated).
    num_examples : int
        Number of examples, the client's weight in aggregation.
    base_version : int
        Version of the global model from which the deltas start.
    parts : dict of str to tuple
        For each tensor that was only partly trained, one entry per axis: a mask of the trained indices, or None for
        all. The trained elements are given by the outer product of the masks; the delta is zero elsewhere.
    """

    deltas: dict[str, NDArray[Any]]
    steps: dict[str, int]
    num_examples: int
    base_version: int = 0
    parts: dict[str, Masks] = field(default_factory=dict)


def trained_part(update: PartialUpdate, name: str) -> NDArray[np.bool_] | None:
    """Return a mask of a tensor's trained elements, of length 1 along axes that were trained completely.

    Parameters
    ----------
    update : PartialUpdate
        An update that passes `check_update`.
    name : str
        Name of one of its deltas.

    Returns
    -------
    ndarray of bool or None
        Broadcasts with the tensor; None if the whole tensor was trained.

    Examples
    --------
    >>> delta = np.array([[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]])
    >>> parts = {"w": (None, np.array([True, True, False]))}
    >>> trained_part(PartialUpdate({"w": delta}, {"w": 1}, 1, parts=parts), "w").tolist()
    [[True, True, False]]
    """
    masks = update.parts.get(name)
    return None if masks is None else outer_mask(masks)


class PackedDeltas(dict[str, NDArray[Any]]):
    """Deltas by name, most of them views of one flat array.

    It behaves like any dict: entries may be changed in place, replaced or removed. `start` returns the position of
    an entry in the array. Copies, including pickled ones, are plain dicts.

    Parameters
    ----------
    flat : array
        Numbers of all tensors as they were written, one tensor after the other.

    Examples
    --------
    >>> deltas = PackedDeltas(np.array([1.0, 2.0, 3.0], np.float32))
    >>> deltas.lay("a", 0, (2, 1))
    >>> deltas.lay("b", 2, ())
    >>> deltas["b"] = np.array(9.0)
    >>> deltas["a"].tolist(), deltas.start("a"), deltas.start("b"), deltas.bound() > 2, deltas.square("a")
    ([[1.0], [2.0]], 0, None, True, 5.0)
    """

    def __init__(self, flat: NDArray[np.float32]) -> None:
        super().__init__()
        self.flat = flat
        self._views: dict[str, tuple[int, NDArray[Any]]] = {}
        self._squares: dict[str, float] = {}

    def lay(self, name: str, start: int, shape: tuple[int, ...]) -> None:
        """Add the tensor whose numbers begin at ``start``."""
        view = self.flat[start : start + math.prod(shape)].reshape(shape)
        self._views[name] = start, view
        self[name] = view

    def start(self, name: str) -> int | None:
        """Return where a delta begins in the array; None if it is not in the array."""
        place = self._views.get(name)
        return place[0] if place is not None and self.get(name) is place[1] else None

    def bound(self) -> float:
        """Return an upper bound of all absolute numbers, from the deltas' squares; infinite if unknown."""
        self._squares = {}
        with np.errstate(over="ignore", invalid="ignore"):
            for name, (start, view) in self._views.items():
                if self.get(name) is view:
                    flat = self.flat[start : start + view.size]
                    self._squares[name] = float(flat.dot(flat))
        # A sum of squares in single precision is inexact, and zero for tiny numbers.
        largest = sum(self._squares.values())
        return 2 * math.sqrt(largest) + _TINY if math.isfinite(largest) else math.inf

    def square(self, name: str) -> float | None:
        """Return the sum of a delta's squares from the last call of `bound`; None if it is not known."""
        return self._squares.get(name) if self.start(name) is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        # The views of a copy would no longer be views of its array.
        return dict, (dict(self),)


def reach(numbers: NDArray[Any]) -> float:
    """Return the largest absolute number; infinite if one is NaN.

    >>> reach(np.array([1, -2])), reach(np.array([1.0, np.nan])), reach(np.zeros((0, 3)))
    (2.0, inf, 0.0)
    """
    # Minimum and maximum propagate NaN and, unlike absolute values, need no second array.
    flat = numbers.reshape(-1)
    found = 0.0
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        least, largest = float(np.minimum.reduce(piece)), float(np.maximum.reduce(piece))
        if math.isnan(least) or math.isnan(largest):
            return math.inf
        found = max(found, -least, largest)
    return found
