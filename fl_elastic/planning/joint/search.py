"""The search inside the lanes: options are decided group by group, kept in order of their Lagrangian bound.

A state is a lane with the options of some groups decided. Deciding an option takes its loss away from the bounds of
the state (one for each of several prices), so the smallest of them says how good the state can still become. States
that cannot beat the best known answer, or that no longer fit, are dropped; up to the cap on states this is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.lanes import Lanes
from fl_elastic.planning.joint.prices import losses

__all__ = ["Found", "Priced", "price", "rounded", "sweep"]

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
_Ints = NDArray[np.intp]

# Costs are in units of the room; sums of shifted costs may exceed it by rounding.
_FULL = 1.0 + 1e-12
# How far the best prices are moved to judge states whose room is not like the lane's.
_SPREAD = 1.6
# A lane gets no more than so many equal shares of a fair choice.
_SHARE = 3
# How many lanes are rounded, and by how much their prices are raised until the room is kept.
_ROUNDED = 4
_RAISES = (1.0, 1.01, 1.02, 1.04, 1.08, 1.15, 1.3, 1.6, 2.5, 5.0)


@dataclass(frozen=True, eq=False)
class Priced:
    """Lanes with several prices each.

    Attributes
    ----------
    lanes : Lanes
    prices : array, shape (L, D)
        The best prices found.
    bounds : array, shape (L, P)
    losses : array, shape (L, N, K, P)
    """

    lanes: Lanes
    prices: _Floats
    bounds: _Floats
    losses: _Floats

    @property
    def bound(self) -> _Floats:
        """The least bound of each lane, shape (L,)."""
        least: _Floats = self.bounds.min(axis=1)
        return least

    def at(self, rows: _Ints) -> Priced:
        """Return some of the lanes."""
        return Priced(self.lanes.at(rows), self.prices[rows], self.bounds[rows], self.losses[rows])

    def hopeful(self, threshold: float) -> _Bools:
        """Return the options with which a lane may still exceed a value, shape (L, N, K)."""
        best = (self.bounds[:, None, None, :] - self.losses).min(axis=-1)
        hopeful: _Bools = self.lanes.allowed & (best > threshold)
        return hopeful

    def core(self, hopeful: _Bools, size: int) -> _Bools:
        """Keep all hopeful options of the groups that are hardest to decide, elsewhere the best."""
        loss = np.where(hopeful, self.losses[..., 0], np.inf)
        best = loss.argmin(axis=-1)
        second = np.sort(loss, axis=-1)[..., min(1, loss.shape[-1] - 1)]
        rank = second.argsort(axis=-1).argsort(axis=-1)
        only_best = np.arange(loss.shape[-1]) == best[..., None]
        kept: _Bools = np.where((rank < size)[..., None], hopeful, hopeful & only_best)
        return kept

    def work(self, keep: _Bools) -> float:
        """Return how many bounds a sweep computes per state that it keeps."""
        kept = keep.any(axis=0).sum(axis=-1)
        return float(kept[kept > 1].sum() * self.bounds.shape[1])


@dataclass(frozen=True, eq=False)
class Found:
    """The best states of a sweep, best first.

    Attributes
    ----------
    lane : array of int, shape (M,)
    options : array of int, shape (M, N)
        -1 where a group is not decided.
    dropped : array, shape (L,)
        Largest bound of the states of each lane that were dropped because of the cap; minus infinity if none was.
    """

    lane: _Ints
    options: _Ints
    dropped: _Floats


def price(lanes: Lanes, prices: _Floats) -> Priced:
    """Return the lanes with their best prices, and with each price moved up and down.

    Parameters
    ----------
    prices : array, shape (L, D)
    """
    dims = prices.shape[1]
    factors = [np.ones((1, dims))]
    for factor in (_SPREAD, 1 / _SPREAD):
        factors.append(np.where(np.eye(dims, dtype=bool), factor, 1.0))
    pool = prices[:, None, :] * np.concatenate(factors)
    bounds, lost = losses(lanes, pool)
    return Priced(lanes, prices, bounds, lost)


def rounded(priced: Priced) -> _Ints:
    """Return, for a few lanes of largest bound, the options that are best at just high enough prices.

    Prices are raised until the room is kept. Shape (M, N); lanes where no factor is enough are left out.
    """
    lanes = priced.lanes
    groups = np.arange(lanes.value.shape[1])
    answers = []
    for row in np.argsort(-priced.bound, kind="stable")[:_ROUNDED].tolist():
        charge = lanes.cost[row] @ priced.prices[row]
        for factor in _RAISES:
            options = (lanes.value[row] - factor * charge).argmax(axis=-1)
            if (lanes.cost[row, groups, options].sum(axis=0) <= _FULL).all():
                answers.append(options)
                break
    return np.array(answers, dtype=np.intp).reshape(-1, len(groups))


def sweep(
    priced: Priced,
    keep: _Bools,
    threshold: float,
    cap: int,
    *,
    answers: int = 8,
    most_groups: int | None = None,
) -> Found:
    """Return the best choices among the kept options; groups whose options cost most are decided first.

    Parameters
    ----------
    keep : array of bool, shape (L, N, K)
    threshold : float
        States that cannot exceed this value are dropped.
    cap : int
        Most states kept after each group.
    answers : int
        Most choices returned.
    most_groups : int, optional
        Stop when so many groups are decided; the states of largest bound are returned then.
    """
    lanes, fair = priced.lanes, most_groups is not None
    count, dims = len(lanes), lanes.cost.shape[-1]
    alive = np.asarray(keep.any(axis=-1).all(axis=-1))
    keep = keep & alive[:, None, None]
    decided = (keep.sum(axis=-1) <= 1).all(axis=0)
    first = keep.argmax(axis=-1)
    first[:, ~decided] = -1
    rows, columns = np.arange(count)[:, None], np.flatnonzero(decided)[None, :]
    picked = (rows, columns, first[:, columns[0]])
    lane = np.flatnonzero(alive)
    bound = (priced.bounds - priced.losses[picked].sum(axis=1))[lane]
    spent = lanes.cost[picked].sum(axis=1)[lane]
    value = (lanes.base + lanes.value[picked].sum(axis=1))[lane]
    start = (spent <= _FULL).all(axis=-1)
    lane, bound, spent, value = lane[start], bound[start], spent[start], value[start]
    origin = lane
    dropped = np.full(count, -np.inf)
    open_groups = np.flatnonzero(~decided)
    widest = np.where(keep[..., None], lanes.cost, 0.0).max(axis=(0, 2, 3))
    history: list[tuple[int, _Ints, _Ints]] = []
    for group in open_groups[np.argsort(-widest[open_groups], kind="stable")].tolist():
        choice = np.flatnonzero(keep[:, group].any(axis=0))
        lost = np.where(keep[:, group, choice, None], priced.losses[:, group, choice], np.inf)
        bounds = bound[:, None, :] - lost[lane]
        reach = bounds.min(axis=-1)
        costs = spent[:, None, :] + lanes.cost[:, group, choice][lane]
        fits = (reach > threshold) & (costs <= _FULL).all(axis=-1)
        parent, option = np.nonzero(fits)
        reach, costs = reach[parent, option], costs[parent, option]
        value = value[parent] + lanes.value[lane[parent], group, choice[option]]
        lane_of = lane[parent]
        chosen = np.arange(len(parent))
        if dims == 1:
            chosen = _undominated(lane_of, costs[:, 0], value)
        if len(chosen) > cap:
            if dims == 1:
                kept = _spread(lane_of[chosen], costs[chosen, 0], reach[chosen], cap)
            else:
                kept = _largest(lane_of[chosen], reach[chosen], cap, fair=fair)
            out = np.delete(chosen, kept)
            np.maximum.at(dropped, lane_of[out], reach[out])
            chosen = chosen[kept]
        parent, option = parent[chosen], option[chosen]
        lane, bound = lane_of[chosen], bounds[parent, option]
        spent, value = costs[chosen], value[chosen]
        history.append((group, parent, choice[option]))
        if not len(chosen) or len(history) == most_groups:
            break
    merit = value if len(history) == len(open_groups) else bound.min(axis=-1)
    best = _largest(lane, merit, answers, fair=fair)
    return Found(lane[best], _options(first, origin, history, best), dropped)


def _largest(lane: _Ints, merit: _Floats, count: int, *, fair: bool) -> _Ints:
    """Return the states of largest merit, best first; if fair, none of the lanes has them all."""
    order = np.argsort(-merit, kind="stable")
    if fair and len(order) > count:
        by_lane = order[np.argsort(lane[order], kind="stable")]
        starts = np.flatnonzero(np.diff(lane[by_lane], prepend=-1))
        sizes = np.diff(starts, append=len(by_lane))
        rank = np.empty_like(order)
        rank[by_lane] = np.arange(len(by_lane)) - np.repeat(starts, sizes)
        order = order[rank[order] < max(1, _SHARE * count // len(starts))]
    return order[:count]


def _undominated(lane: _Ints, cost: _Floats, value: _Floats) -> _Ints:
    """Return the states of one cost that no cheaper state of their lane equals in value."""
    if not len(value):
        return np.arange(0)
    order = np.lexsort((-value, cost, lane))
    worth = value[order] - value.min()
    # Lanes follow each other upwards, so that one running maximum serves them all.
    worth = worth + lane[order] * (2.0 * worth.max() or 1.0)
    best = np.maximum.accumulate(worth)
    kept: _Bools = np.concatenate([[True], worth[1:] > best[:-1]])
    return order[kept]


def _spread(lane: _Ints, cost: _Floats, reach: _Floats, cap: int) -> _Ints:
    """Return the states of largest bound at every level of cost.

    Where worth follows cost, all bounds are alike, and what matters is that every cost can be completed.
    """
    levels = max(1, cap // len(np.unique(lane)))
    level = np.minimum((cost * levels).astype(np.int64), levels - 1) + lane * levels
    order = np.lexsort((-reach, level))
    first = np.flatnonzero(np.diff(level[order], prepend=-1))
    return order[first]


def _options(
    first: _Ints, origin: _Ints, history: list[tuple[int, _Ints, _Ints]], best: _Ints
) -> _Ints:
    """Trace states back to the option that each of their groups got."""
    decided = []
    state = best
    for group, parent, option in reversed(history):
        decided.append((group, option[state]))
        state = parent[state]
    options = first[origin[state]]
    for group, option in decided:
        options[:, group] = option
    return options
