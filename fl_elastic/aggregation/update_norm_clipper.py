"""Clip each client's change of a tensor to a multiple of what clients changed it by in earlier rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role
from fl_elastic.update.partial import PackedDeltas

__all__ = ["UpdateNormClipper"]

_ROUNDS = 5
# Of fewer contributors one can move what is usual; what they did may then only double.
_FEW, _GROWTH = 3, 2.0
# The share of the clients that may say what they like: one of so many.
_PARTS = 5
# Small parameters of an untrained model go further in a round than they are large, on fast devices many times: from
# the first bound on it is asked what the others of the round do, beyond the second nobody is honest.
_DOUBTED, _FIRST = 4.0, 1000.0
# What is usual is known of one round alone then: so many times that, where more would be believed later on.
_NEW = 10.0
# No tensor's name begins with a dot.
_EARLY = ".early."
_Weights = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class UsualSizes:
    """State of an `UpdateNormClipper`: by tensor, sizes of the last rounds, and of those too few to call usual."""

    usual: dict[str, tuple[float, ...]]
    early: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        for least, named in ((math.ulp(0.0), self.usual), (0.0, self.early)):
            for name, sizes in named.items():
                if not all(least <= size < math.inf for size in sizes):
                    raise ValueError(f"sizes {sizes[:3]} of {name[:80]!r} are no sizes")


class UpdateNormClipper:
    """Shortens a client's change of a parameter that is many times as large as is usual for the tensor.

    A change is as large as the root of its mean square. Usual is the largest of the last five rounds, but for
    a fifth of those who trained the tensor: in an unequal fleet most take few steps, and some many. So one reply
    can neither throw the model away nor fill the moments of a server's optimiser, whose root mean squares take
    hundreds of rounds to forget it. Directions are believed: it is no robust rule.

    Nothing is shortened before it is known what is usual. A change of a tensor of which that is not known, and
    which is more than four times as large as the tensor or the model (of a bias or a scale as the model's largest
    tensor), is `doubted`: whoever merges keeps it until all updates of the round were heard. What others do to the
    tensor tells then, and ten times that is believed, or four times the size; where fewer than three train it, how
    far they go beside the sizes of theirs. With one or two clients a change may be a thousand times as large as the
    tensor.

    Statistics are left alone. A change that honest clients make larger from one round to the next is shortened
    once, and then usual.

    Parameters
    ----------
    most : float
        So many times the usual size is believed.

    Examples
    --------
    >>> manifest = Manifest(("w",), ((1,),), ("float32",), (Role.PARAMETER,))
    >>> bounds, base = UpdateNormClipper(10.0), {"w": np.array([1.0])}
    >>> updates = [PartialUpdate({"w": np.array([x])}, {"w": 1}, num_examples=1) for x in (0.1, 0.1, 0.1, 9e29)]
    >>> held = [each for each in updates if bounds.doubted(each, manifest, base)]
    >>> for update in held:
    ...     bounds.hear(update, manifest)
    >>> for update in updates:
    ...     update, shortened = bounds.bounded(update, manifest, base, heard=update in held)
    ...     print(float(update.deltas["w"][0]), shortened)
    0.1 []
    0.1 []
    0.1 []
    4.0 ['w']
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._usual: dict[str, list[float]] = {}
        self._seen: dict[str, list[float]] = {}
        # Of tensors of which too little is known to call it usual: one device may take a step, another twenty.
        self._early: dict[str, list[float]] = {}
        # Of the round's model.
        self._sizes: dict[str, float] | None = None
        # Of each client of the round, how far it went at most beside the size of a tensor.
        self._times: list[float] = []

    def doubted(self, update: PartialUpdate, manifest: Manifest, base: _Weights) -> float:
        """Return how many times as large as its tensor the largest doubtful change is; 0 where none is doubtful."""
        if not math.isfinite(self.most):
            return 0.0
        times = [
            _size_in(update, name) / self._size_of(name, manifest, base)
            for name in update.deltas
            if manifest.role(name) is Role.PARAMETER and name not in self._usual
        ]
        if times:
            self._times.append(max(times))
        return max((each for each in times if each > _DOUBTED), default=0.0)

    def hear(self, update: PartialUpdate, manifest: Manifest) -> None:
        """Note how large the changes of an update are, which is bounded once all of the round were heard."""
        for name in update.deltas:
            if manifest.role(name) is Role.PARAMETER:
                self._seen.setdefault(name, []).append(_size_in(update, name))

    def bounded(
        self, update: PartialUpdate, manifest: Manifest, base: _Weights, *, heard: bool = False
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
        heard : bool
            Whether `hear` was told of it, and of all others of the round.
        """
        if not math.isfinite(self.most):
            return update, []
        deltas, shortened = update.deltas, []
        for name in update.deltas:
            if manifest.role(name) is not Role.PARAMETER:
                continue
            size, most = _size_in(update, name), self._most_of(name, manifest, base, heard)
            if heard:
                self._seen[name].remove(size)
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
            before = self._usual.get(name, [])
            if not before:
                sizes = self._early[name] = [*self._early.get(name, []), *sizes]
                if len(sizes) < _FEW:
                    continue
                del self._early[name]
            now = _usual_of(sizes)
            if before and len(sizes) < _FEW:
                now = min(now, _GROWTH * max(before))
            # A tensor that nobody changes any more may move again.
            if now > 0:
                self._usual[name] = [*before, now][-_ROUNDS:]
        self._seen, self._sizes, self._times = {}, None, []

    def forget(self) -> None:
        """Drop what was seen in a round that does not count."""
        self._seen, self._sizes, self._times = {}, None, []

    def _most_of(self, name: str, manifest: Manifest, base: _Weights, heard: bool) -> float:
        """Return how large a change of a tensor may be."""
        known = self._usual.get(name)
        if known:
            return self.most * max(known)
        sizes = [*self._early.get(name, []), *self._seen.get(name, [])]
        if heard and len(sizes) >= _FEW:
            return max(
                min(self.most, _NEW) * _usual_of(sizes),
                _DOUBTED * self._size_of(name, manifest, base),
            )
        times = _FIRST
        if heard and len(self._times) >= _FEW:
            times = min(max(min(self.most, _NEW) * _usual_of(self._times), _DOUBTED), _FIRST)
        return times * self._size_of(name, manifest, base)

    def _size_of(self, name: str, manifest: Manifest, base: _Weights) -> float:
        """Return how large a tensor is, or the model."""
        if self._sizes is None:
            sizes = {
                n: _size(base[n]) for n in manifest.names if manifest.role(n) is Role.PARAMETER
            }
            whole, largest = _sizes_of_model(manifest, sizes)
            # Biases and scales begin as next to nothing beside weights with few inputs.
            self._sizes = {
                n: max(size, largest if len(manifest.shape(n)) < 2 else whole)
                for n, size in sizes.items()
            }
        return self._sizes[name]

    def to_state(self) -> UsualSizes:
        """Return what must be found again."""
        return UsualSizes(
            {name: tuple(sizes) for name, sizes in self._usual.items() if sizes},
            {name: tuple(sizes) for name, sizes in self._early.items()},
        )

    def restore(self, state: UsualSizes) -> None:
        """Put back what `to_state` gave."""
        self._usual = {name: [*sizes][-_ROUNDS:] for name, sizes in state.usual.items()}
        self._early = {name: [*sizes][1 - _FEW :] for name, sizes in state.early.items()}


def _usual_of(sizes: Sequence[float]) -> float:
    """Return the largest size but for those of a fifth of the clients, at least one; of one or two the mean.

    A fast device takes many times the steps of most, so the median of an unequal fleet says too little.

    >>> _usual_of([0.1, 0.1, 0.1, 0.1, 2.0, 2.0, 9e29]), _usual_of([0.1, 0.3])
    (2.0, 0.2)
    """
    if len(sizes) < _FEW:
        return fmean(sizes)
    return sorted(sizes)[-1 - -(-len(sizes) // _PARTS)]


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


def _size_in(update: PartialUpdate, name: str) -> float:
    """Return the root of the mean square of a delta, which a decoded update may know."""
    deltas, delta = update.deltas, update.deltas[name]
    square = deltas.square(name) if isinstance(deltas, PackedDeltas) else None
    if square is None or not 0 < square < math.inf:
        return _size(delta)
    return math.sqrt(square / delta.size)


def _sizes_of_model(manifest: Manifest, sizes: Mapping[str, float]) -> tuple[float, float]:
    """Return the size of all parameters together, and that of the largest one; 1 for a model of zeros."""
    counts = [math.prod(manifest.shape(name)) for name in sizes]
    total = sum(size**2 * count for size, count in zip(sizes.values(), counts, strict=True))
    return (math.sqrt(total / sum(counts)), max(sizes.values())) if total > 0 else (1.0, 1.0)


def _shortened(delta: NDArray[Any], size: float) -> NDArray[Any]:
    # In double precision, in which neither the squares of huge numbers nor their inverse are out of range.
    exact = np.asarray(delta, np.float64)
    return np.asarray(exact * (size / _size(exact)), np.asarray(delta).dtype)
