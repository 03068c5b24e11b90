"""Clip each client's change of a tensor to a multiple of the changes in earlier rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.claims import FEWEST, may_lie
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role, Weights
from fl_elastic.update.partial import PackedDeltas

# Number of past rounds from which the usual size of a change is computed.
_ROUNDS = 5
# If there are few contributors, a single one could shift the usual size; then it grows at most by this factor.
_GROWTH = 2.0
# In one round, small parameters of an untrained model change by several times their own size, on fast devices by
# many times. A change above the first multiple is compared with the round's other changes. No honest change exceeds
# the second multiple.
_DOUBTED, _FIRST = 4.0, 1000.0
# If the usual size is known only from the same round, this smaller multiple of it is accepted.
_NEW = 10.0
# A change smaller than this, relative to the tensor or the model, is rounding error: for example that of a bias
# before a BatchNorm, whose exact gradient is zero, adds up to about 1e-6 over a round's steps with batches of two.
_ROUNDED = 1e-5
# No tensor's name begins with a dot.
_EARLY = ".early."


@dataclass(frozen=True)
class UsualSizes:
    """State of a `ChangeClipper`: by tensor, usual sizes of recent rounds, and sizes known from too few clients."""

    usual: dict[str, tuple[float, ...]]
    early: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        for least, named in ((math.ulp(0.0), self.usual), (0.0, self.early)):
            for name, sizes in named.items():
                if not all(least <= size < math.inf for size in sizes):
                    raise ValueError(f"sizes {sizes[:3]} of {name[:80]!r} are not valid sizes")


class ChangeClipper:
    """Shortens a client's change of a parameter that is many times larger than usual for the tensor.

    The size of a change is its root mean square. The usual size is the largest one in the last five rounds, without
    the largest fifth of each round's contributors: in an unequal fleet most clients take few steps, and some take
    many. So one reply can neither destroy the model nor dominate the second moments of a server optimiser for
    hundreds of rounds. Directions are not checked: this is not a robust rule.

    Nothing is shortened until the usual size is known. Before that, a change is `doubted` if it is more than four
    times as large as the tensor or the model (for a bias or scale, as the model's largest tensor). The caller holds
    a doubted update back until `hear` was called for all updates of the round. A change is then accepted up to ten
    times the other clients' change of the tensor, or up to four times the size of the tensor. If fewer than three
    clients train the tensor, it is compared with the other clients' largest changes relative to their tensors'
    sizes. With one or two clients a change may be a thousand times as large as the tensor.

    Running statistics are never shortened. If honest clients' changes become larger in some round, they are
    shortened in that round only, and count as usual afterwards.

    Parameters
    ----------
    most : float
        Largest accepted multiple of the usual size.

    Examples
    --------
    >>> manifest = Manifest(("w",), ((1,),), ("float32",), (Role.PARAMETER,))
    >>> bounds, base = ChangeClipper(10.0), {"w": np.array([1.0])}
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
        # Sizes of changes of tensors that too few clients have trained: one device may take one step, another
        # twenty.
        self._early: dict[str, list[float]] = {}
        # Sizes of the tensors of the round's model.
        self._sizes: dict[str, float] | None = None
        # For each client of the round, its largest change relative to the size of the tensor.
        self._times: list[float] = []

    def doubted(self, update: PartialUpdate, manifest: Manifest, base: Weights) -> float:
        """Return the largest doubtful change, as a multiple of its tensor's size; 0 if no change is doubtful."""
        if not math.isfinite(self.most):
            return 0.0
        times = [
            _size_in(update, name) / self._size_of(name, manifest, base)
            for name in update.deltas
            if manifest.role(name) is Role.PARAMETER and name not in self._usual
        ]
        if times:
            self._times.append(max(times))
        return max((time for time in times if time > _DOUBTED), default=0.0)

    def hear(self, update: PartialUpdate, manifest: Manifest) -> None:
        """Record the sizes of an update's changes; call `bounded` after all updates of the round were recorded."""
        for name in update.deltas:
            if manifest.role(name) is Role.PARAMETER:
                self._seen.setdefault(name, []).append(_size_in(update, name))

    def bounded(
        self, update: PartialUpdate, manifest: Manifest, base: Weights, *, heard: bool = False
    ) -> tuple[PartialUpdate, list[str]]:
        """Return the update with too large changes shortened, and the names of their tensors.

        Parameters
        ----------
        update : PartialUpdate
            An update that passes `fl_elastic.update.checks.check_update`; its deltas may be replaced.
        manifest : Manifest
            Manifest of the model.
        base : mapping of str to ndarray
            The model.
        heard : bool
            Whether `hear` was called for this update and for all others of the round.
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
            if size > most and size > _ROUNDED * self._size_of(name, manifest, base):
                shortened.append(name)
                size = most
            self._seen.setdefault(name, []).append(size)
        for name in shortened:
            deltas[name] = _shortened(deltas[name], self._seen[name][-1])
        return replace(update, deltas=deltas), shortened

    def close(self) -> None:
        """End a round: the sizes of its changes count for the usual sizes in later rounds."""
        for name, sizes in self._seen.items():
            before = self._usual.get(name, [])
            if not before:
                sizes = self._early[name] = [*self._early.get(name, []), *sizes]
                if len(sizes) < FEWEST:
                    continue
                del self._early[name]
            now = _usual_of(sizes)
            if before and len(sizes) < FEWEST:
                now = min(now, _GROWTH * max(before))
            # A tensor that no client changes in this round may change again later.
            if now > 0:
                self._usual[name] = [*before, now][-_ROUNDS:]
        self._seen, self._sizes, self._times = {}, None, []

    def forget(self) -> None:
        """Drop the sizes of a round that does not count."""
        self._seen, self._sizes, self._times = {}, None, []

    def _most_of(self, name: str, manifest: Manifest, base: Weights, heard: bool) -> float:
        """Return the largest accepted size of a change of a tensor."""
        known = self._usual.get(name)
        if known:
            return self.most * max(known)
        sizes = [*self._early.get(name, []), *self._seen.get(name, [])]
        if heard and len(sizes) >= FEWEST:
            return max(
                min(self.most, _NEW) * _usual_of(sizes),
                _DOUBTED * self._size_of(name, manifest, base),
            )
        times = _FIRST
        if heard and len(self._times) >= FEWEST:
            times = min(max(min(self.most, _NEW) * _usual_of(self._times), _DOUBTED), _FIRST)
        return times * self._size_of(name, manifest, base)

    def _size_of(self, name: str, manifest: Manifest, base: Weights) -> float:
        """Return the size of a tensor, or that of the model if it is larger."""
        if self._sizes is None:
            sizes = {
                n: _size(base[n]) for n in manifest.names if manifest.role(n) is Role.PARAMETER
            }
            whole, largest = _sizes_of_model(manifest, sizes)
            # Biases and scales may begin near zero, so they are compared with the largest tensor.
            self._sizes = {
                n: max(size, largest if len(manifest.shape(n)) < 2 else whole)
                for n, size in sizes.items()
            }
        return self._sizes[name]

    def to_state(self) -> UsualSizes:
        """Return the state to be stored."""
        return UsualSizes(
            {name: tuple(sizes) for name, sizes in self._usual.items() if sizes},
            {name: tuple(sizes) for name, sizes in self._early.items()},
        )

    def restore(self, state: UsualSizes) -> None:
        """Restore what `to_state` returned."""
        self._usual = {name: [*sizes][-_ROUNDS:] for name, sizes in state.usual.items()}
        self._early = {name: [*sizes][1 - FEWEST :] for name, sizes in state.early.items()}


def _usual_of(sizes: Sequence[float]) -> float:
    """Return the largest size after dropping the largest fifth (at least one); the mean of one or two sizes.

    A fast device takes many times more steps than most, so the median of an unequal fleet would be too small.

    >>> _usual_of([0.1, 0.1, 0.1, 0.1, 2.0, 2.0, 9e29]), _usual_of([0.1, 0.3])
    (2.0, 0.2)
    """
    if len(sizes) < FEWEST:
        return fmean(sizes)
    return sorted(sizes)[-1 - may_lie(len(sizes))]


def _size(numbers: NDArray[Any]) -> float:
    """Return the root of the mean square."""
    flat = np.asarray(numbers).reshape(-1)
    if not flat.size:
        return 0.0
    with np.errstate(over="ignore"):
        total = float(np.vdot(flat, flat)) if flat.dtype.kind == "f" else math.inf
    if not math.isfinite(total) or total == 0.0 or flat.dtype.itemsize < 4:
        # Squares may be out of the range of the numbers' own dtype.
        total = float(np.square(flat, dtype=np.float64).sum())
    return math.sqrt(total / flat.size)


def _size_in(update: PartialUpdate, name: str) -> float:
    """Return the root mean square of a delta; a decoded update may have computed the sum of squares already."""
    deltas, delta = update.deltas, update.deltas[name]
    square = deltas.square(name) if isinstance(deltas, PackedDeltas) else None
    if square is None or not 0 < square < math.inf:
        return _size(delta)
    return math.sqrt(square / delta.size)


def _sizes_of_model(manifest: Manifest, sizes: Mapping[str, float]) -> tuple[float, float]:
    """Return the size of all parameters together and that of the largest tensor; 1 for a model of zeros."""
    counts = [math.prod(manifest.shape(name)) for name in sizes]
    total = sum(size**2 * count for size, count in zip(sizes.values(), counts, strict=True))
    return (math.sqrt(total / sum(counts)), max(sizes.values())) if total > 0 else (1.0, 1.0)


def _shortened(delta: NDArray[Any], size: float) -> NDArray[Any]:
    # In double precision, where neither the squares of huge numbers nor their inverses are out of range.
    exact = np.asarray(delta, np.float64)
    return np.asarray(exact * (size / _size(exact)), np.asarray(delta).dtype)
