"""How far a client may change a tensor: so many times what clients changed it in the rounds before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

__all__ = ["SizeBounds"]

_ROUNDS = 5
# Fewer contributors have no median that one of them cannot move; what they did may then only double.
_FEW, _GROWTH = 3, 2.0
# Small parameters of an untrained model go further in a round than they are large: honest clients of the demo did.
_FIRST = 4.0
_Weights = Mapping[str, NDArray[Any]]


class SizeBounds:
    """Shortens a client's change of a parameter that is many times as large as is usual for the tensor.

    A change is as large as the root of its mean square. What is usual is the largest median of the last five
    rounds, over those who trained the tensor; in the first round a change may be four times as large as the tensor
    itself, or as the model. So one reply can neither throw the model away nor fill the moments of a server's
    optimiser, whose root mean squares take hundreds of rounds to forget it. Directions are believed: it is no
    robust rule.

    Statistics are left alone. A change that honest clients make larger from one round to the next is shortened
    once, and then usual.

    Parameters
    ----------
    most : float
        So many times the usual size is believed.

    Examples
    --------
    >>> manifest = Manifest(("w",), ((1,),), ("float32",), (Role.PARAMETER,))
    >>> bounds, base = SizeBounds(10.0), {"w": np.array([1.0])}
    >>> for change in (0.1, 9e29):
    ...     update = PartialUpdate({"w": np.array([change])}, {"w": 1}, num_examples=1)
    ...     update, shortened = bounds.bounded(update, manifest, base)
    ...     bounds.close()
    ...     print(float(update.deltas["w"][0]), shortened)
    0.1 []
    1.0 ['w']
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._usual: dict[str, list[float]] = {}
        self._seen: dict[str, list[float]] = {}
        self._model_size: float | None = None

    def bounded(
        self, update: PartialUpdate, manifest: Manifest, base: _Weights
    ) -> tuple[PartialUpdate, list[str]]:
        """Return the update with what is too large shortened, and the names of those tensors.

        Parameters
        ----------
        update : PartialUpdate
            One that passes `fl_elastic.update.check_update`; its deltas may be replaced.
        manifest : Manifest
            Of the model.
        base : mapping of str to ndarray
            The model.
        """
        if not math.isfinite(self.most):
            return update, []
        deltas, shortened = update.deltas, []
        for name, delta in update.deltas.items():
            if manifest.role(name) is not Role.PARAMETER:
                continue
            size, most = _size(delta), self.most * self._usual_size(name, manifest, base)
            if size > most:
                shortened.append(name)
                size = most
            self._seen.setdefault(name, []).append(size)
        for name in shortened:
            deltas[name] = _shortened(deltas[name], self._seen[name][-1])
        return replace(update, deltas=deltas), shortened

    def close(self) -> None:
        """End a round: what its clients did is what is usual from now on."""
        for name, sizes in self._seen.items():
            before = self._usual.setdefault(name, [])
            now = median(sizes)
            if before and len(sizes) < _FEW:
                now = min(now, _GROWTH * max(before))
            # A tensor that nobody changes any more may move again.
            if now > 0:
                self._usual[name] = [*before, now][-_ROUNDS:]
        self._seen, self._model_size = {}, None

    def forget(self) -> None:
        """Drop what was seen in a round that does not count."""
        self._seen, self._model_size = {}, None

    def _usual_size(self, name: str, manifest: Manifest, base: _Weights) -> float:
        known = self._usual.get(name)
        if known:
            return max(known)
        if self._model_size is None:
            self._model_size = _model_size(manifest, base)
        return _FIRST * max(_size(base[name]), self._model_size) / self.most

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what must outlast a restart."""
        return {name: np.array(sizes) for name, sizes in self._usual.items() if sizes}

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `to_arrays` gave."""
        usual = {
            name: np.asarray(sizes, np.float64).reshape(-1)[-_ROUNDS:].tolist()
            for name, sizes in arrays.items()
        }
        for name, sizes in usual.items():
            if not all(0 < size < math.inf for size in sizes):
                raise ValueError(f"sizes {sizes[:3]} of {name[:80]!r} are no sizes")
        self._usual = usual


def _size(numbers: NDArray[Any]) -> float:
    """Return the root of the mean square."""
    flat = np.asarray(numbers).reshape(-1)
    if not flat.size:
        return 0.0
    with np.errstate(over="ignore"):
        total = float(np.vdot(flat, flat)) if flat.dtype.kind == "f" else math.inf
    if not math.isfinite(total) or total == 0.0 or flat.dtype.itemsize < 4:
        # Squares beyond the range of the numbers' own type.
        total = float(np.square(flat, dtype=np.float64).sum())
    return math.sqrt(total / flat.size)


def _model_size(manifest: Manifest, base: _Weights) -> float:
    """Return the size of all parameters together; 1 for a model of zeros."""
    names = [n for n in manifest.names if manifest.role(n) is Role.PARAMETER]
    count = sum(math.prod(manifest.shape(name)) for name in names)
    total = sum(_size(base[name]) ** 2 * math.prod(manifest.shape(name)) for name in names)
    return math.sqrt(total / count) if total > 0 else 1.0


def _shortened(delta: NDArray[Any], size: float) -> NDArray[Any]:
    # In double precision, in which neither the squares of huge numbers nor their inverse are out of range.
    exact = np.asarray(delta, np.float64)
    return np.asarray(exact * (size / _size(exact)), np.asarray(delta).dtype)
