"""A partial update: the deltas of the tensors that one client trained, and the checks of such updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.manifest import FLOATS, Manifest, Role, is_variance
from fl_elastic.update.parts import Masks, outer_mask, take_part

MAX_VERSION = 2**62
# Relative error above that of bf16.
_ROUNDED = 0.01
# Numbers below this have a square of zero in single precision.
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
        For each tensor that was only partly trained, one entry per axis: a mask of the trained indices, None for
        all. The trained elements are the outer product of the masks; the delta is zero elsewhere.
    """

    deltas: dict[str, NDArray[Any]]
    steps: dict[str, int]
    num_examples: int
    base_version: int = 0
    parts: dict[str, Masks] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Counts that a server accepts: larger ones are taken for damage or an attack.

    Attributes
    ----------
    max_steps : int
        Most local steps per tensor.
    max_examples : int
        Most examples per client.
    max_change : float
        Largest absolute delta; far below the range of fp32, so that no sum can overflow.
    """

    max_steps: int = 1_000_000
    max_examples: int = 100_000_000
    max_change: float = 1e30


def check_update(update: PartialUpdate, manifest: Manifest, limits: Limits | None = None) -> None:
    """Raise UpdateError unless ``update`` can be merged.

    Checks names, roles, shapes, finiteness, step counts, trained parts, the example count and the base
    version.
    """
    limits = limits or Limits()
    check_count("num_examples", update.num_examples, 1, limits.max_examples)
    check_count("base_version", update.base_version, 0, MAX_VERSION)
    if set(update.steps) != set(update.deltas):
        odd = sorted(set(update.steps) ^ set(update.deltas))
        raise UpdateError(f"deltas and steps must name the same tensors, they differ in {odd[:3]}")
    packed = update.deltas if isinstance(update.deltas, PackedDeltas) else None
    together = math.inf if packed is None else packed.bound()
    ranges = {dtype: min(limits.max_change, _range_of(dtype) / 4) for dtype in FLOATS}
    for name, delta in update.deltas.items():
        index = manifest.index.get(name)
        if index is None:
            raise UpdateError(f"tensor {name!r} is not in the manifest {manifest.hash}")
        if manifest.roles[index] is Role.COUNTER:
            raise UpdateError(
                f"tensor {name!r} holds integers, which are never averaged; leave it out"
            )
        shape = np.shape(delta)
        if shape != manifest.shapes[index]:
            raise UpdateError(
                f"delta of {name!r} has shape {shape}, the manifest says {manifest.shapes[index]}"
            )
        largest = ranges[manifest.dtypes[index]]
        # The squares, which are needed later anyway, bound all numbers. If they do not suffice, check each number.
        if packed is None or together > largest or packed.start(name) is None:
            _check_numbers(name, np.asarray(delta), largest)
        check_count(f"step count of {name!r}", update.steps[name], 1, limits.max_steps)

    for name, masks in update.parts.items():
        _check_part(update, name, masks)


def check_variances(update: PartialUpdate, base: Mapping[str, NDArray[Any]]) -> None:
    """Raise UpdateError if a running variance would become negative by more than codecs round.

    Parameters
    ----------
    update : PartialUpdate
        An update that passes `check_update`.
    base : mapping of str to ndarray
        The model from which it starts.
    """
    for name, delta in update.deltas.items():
        if not is_variance(name):
            continue
        old = np.asarray(base[name], np.float64)
        rounding = _ROUNDED * (np.abs(old) + np.abs(delta))
        if (old + delta < -rounding).any():
            least = float((old + delta).min())
            raise UpdateError(f"running variance {name!r} would be {least:.3g}, which none can be")


def _check_numbers(name: str, delta: NDArray[Any], largest: float) -> None:
    if delta.dtype.kind not in "fiu":
        raise UpdateError(f"delta of {name!r} does not hold real numbers")
    found = reach(delta)
    if not math.isfinite(found):
        raise UpdateError(f"delta of {name!r} holds NaN or infinite values")
    if found > largest:
        raise UpdateError(f"delta of {name!r} reaches {found:.3g}, more than {largest:.3g}")


@cache
def _range_of(dtype: str) -> float:
    """Return the largest number of a manifest's floating dtype, as it is held outside torch."""
    return float(np.finfo("float32" if dtype == "bfloat16" else dtype).max)


def _check_part(update: PartialUpdate, name: str, masks: Masks) -> None:
    """Raise UpdateError unless ``masks`` describe a part of the tensor and the delta is zero outside it."""
    if name not in update.deltas:
        raise UpdateError(f"tensor {str(name)[:80]!r} has a trained part but no delta")
    delta = np.asarray(update.deltas[name])
    if not isinstance(masks, tuple) or len(masks) != delta.ndim:
        raise UpdateError(
            f"trained part of {name!r} must be a tuple of {delta.ndim} masks, one per axis"
        )
    if all(mask is None for mask in masks):
        raise UpdateError(f"trained part of {name!r} is all of it; leave it out of the parts")
    for axis, (mask, count) in enumerate(zip(masks, delta.shape, strict=True)):
        if mask is None:
            continue
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (count,):
            raise UpdateError(
                f"trained part of {name!r} must have a boolean mask of shape ({count},) or None "
                f"for axis {axis}"
            )
    # Counting is many times cheaper than building the outer product and checking outside it.
    if np.count_nonzero(delta) != np.count_nonzero(take_part(delta, masks)):
        raise UpdateError(f"delta of {name!r} is not zero outside its trained part")


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


def check_count(what: str, value: object, lowest: int, highest: int) -> None:
    """Raise UpdateError unless ``value`` is an integer from ``lowest`` to ``highest``."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise UpdateError(f"{what} must be an integer, got {repr(value)[:40]}")
    number = int(value)
    if not lowest <= number <= highest:
        # Python refuses to print an integer of thousands of digits.
        seen = number if abs(number) < 2**64 else "beyond 64 bits"
        raise UpdateError(f"{what} is {seen}, expected {lowest} to {highest}")


class PackedDeltas(dict[str, NDArray[Any]]):
    """Deltas by name, most of them views of one flat array.

    It behaves like any dict: entries may be changed in place, replaced or removed. `start` tells where an entry
    lies in the array. Copies, including pickled ones, are plain dicts.

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
        """Return the sum of a delta's squares from the last call of `bound`; None if it has none."""
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
