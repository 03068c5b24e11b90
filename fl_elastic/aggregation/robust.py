"""Rules whose result a minority of bad updates, up to `MergeOptions.bad_share`, cannot control."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.rules import RULES, RobustRule
from fl_elastic.update import PartialUpdate
from fl_elastic.update.partial import trained_part

_Array = NDArray[np.float64]
# Larger than any mean square of numbers that pass the checks, and sums of several are still finite.
_FARTHEST = 1e200


@RULES.register("median")
class Median(RobustRule):
    """Median of each element over the clients that trained it, all with equal weight.

    Yin et al., "Byzantine-Robust Distributed Learning" (ICML 2018).
    """

    def combine(self, deltas: _Array, weights: _Array, bad: int = 0) -> _Array:
        """Return the median of each column."""
        return np.asarray(np.nanmedian(deltas, axis=0))


@RULES.register("trimmed_mean")
class TrimmedMean(RobustRule):
    """Mean of each element without its largest and smallest values: on each side, as many as clients may be bad.

    Yin et al., "Byzantine-Robust Distributed Learning" (ICML 2018). All clients have equal weight.
    """

    def combine(self, deltas: _Array, weights: _Array, bad: int = 0) -> _Array:
        """Return the mean of the middle of each column."""
        # NaN marks an element that the client did not train, and sorts to the end.
        ordered = np.sort(deltas, axis=0)
        trained = np.count_nonzero(~np.isnan(deltas), axis=0)
        cut = np.minimum(bad, (trained - 1) // 2)
        place = np.arange(len(deltas))[:, None]
        inside = (place >= cut) & (place < trained - cut)
        kept = np.where(inside, ordered, 0.0).sum(axis=0)
        return np.asarray(kept / np.maximum(inside.sum(axis=0), 1))


@RULES.register("norm_clipping")
class NormClipping(RobustRule):
    """Weighted mean of deltas shortened to the median norm of the tensor's deltas.

    After Sun et al., "Can You Really Backdoor Federated Learning?" (2019), with a bound per tensor computed from
    the contributors themselves, so that updates may contain different tensors. The rule limits sizes, but does not
    check directions. Norms are per trained element, so that training a part of a tensor does not look like a small
    change. All clients have equal weight, because counts of examples are no more reliable than sizes.
    """

    def combine(self, deltas: _Array, weights: _Array, bad: int = 0) -> _Array:
        """Return the weighted mean of the shortened deltas."""
        trained = ~np.isnan(deltas)
        filled = np.where(trained, deltas, 0.0)
        sizes = np.sqrt((filled**2).sum(axis=1) / np.maximum(trained.sum(axis=1), 1))
        bound = float(np.median(sizes))
        factors = np.minimum(1.0, bound / np.where(sizes > 0, sizes, 1.0)) * weights
        contributed = (weights[:, None] * trained).sum(axis=0)
        return np.asarray(factors @ filled / np.where(contributed > 0, contributed, 1.0))


@RULES.register("krum")
class Krum(RobustRule):
    """The single update that is nearest to most others.

    Blanchard et al., "Machine Learning with Adversaries" (NeurIPS 2017). Updates are compared over the tensors that
    have a quorum. The distance of two updates is the mean squared difference over the tensors that both contain; it
    is the largest possible if these are less than half of the numbers. Tensors that the chosen update does not
    contain are unchanged.
    """

    def combine(self, deltas: _Array, weights: _Array, bad: int = 0) -> _Array:
        """Return the single delta."""
        return np.asarray(np.nan_to_num(deltas[0]))

    def chosen(
        self, updates: Sequence[PartialUpdate], names: Sequence[str], bad: int = 0
    ) -> list[int]:
        """Return the index of the update with the least summed distance to its nearest neighbours."""
        if not names:
            return []
        sizes = {
            name: next(np.size(each.deltas[name]) for each in updates if name in each.deltas)
            for name in names
        }
        flat = [
            np.concatenate([_marked(update, name, sizes[name]) for name in names])
            for update in updates
        ]
        distances = np.array([[_distance(a, b) for b in flat] for a in flat])
        np.fill_diagonal(distances, -1.0)
        nearest = max(len(updates) - bad - 2, 1)
        scores = np.sort(distances, axis=1)[:, 1 : nearest + 1].sum(axis=1)
        return [int(scores.argmin())]


def _marked(update: PartialUpdate, name: str, size: int) -> _Array:
    """Return the delta as a vector, NaN where the client did not train."""
    if name not in update.deltas:
        return np.full(size, np.nan)
    delta, part = np.asarray(update.deltas[name], np.float64), trained_part(update, name)
    return np.asarray(delta if part is None else np.where(part, delta, np.nan)).ravel()


def _distance(one: _Array, other: _Array) -> float:
    """Return the mean squared difference over elements that both have."""
    squares = (one - other) ** 2
    shared = ~np.isnan(squares)
    together = int(shared.sum())
    if 2 * together < len(squares) or not together:
        return _FARTHEST
    return min(float(squares[shared].mean()), _FARTHEST)
