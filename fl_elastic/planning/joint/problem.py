"""The joint choice as tables, and what each depth is worth at most: the Lagrangian bound.

Options cost one thing above the deepest trained group, and another as the deepest itself. All arrays of costs are
in units of their limit, and costs without a limit are left out. With a price on each cost, every group chooses
alone, and ``bound = prices @ room + sum over groups of max over options of (value - prices @ cost)``
is never below the optimum, whatever the prices. The best prices minimise this convex function. It is smoothed (a
log-sum-exp per group, and a logarithmic barrier that keeps prices positive) and minimised by Newton steps; the
smoothing is taken back as they converge, as in interior-point methods (Boyd and Vandenberghe, Convex
Optimization, 11.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.choices import COSTS, Choices, Limits

__all__ = ["Problem", "best_prices", "bounds_above", "bounds_of_depths", "lane", "problem_of"]

# A limit far below the largest cost is no unit for it.
_LEAST_UNIT = 1e-9
# Room below zero by rounding alone still counts as room.
_ROUNDING = 1e-12
# Smoothing, in shares of the value at stake per group: the first, the last, and what it shrinks by.
_FIRST, _LAST, _SHRINK = 0.25, 1e-3, 0.5
_STEPS = 30
# A price changes by no more than this factor per step.
_LEAP = 4.0
# Weights below exp(-60) mean nothing, and numbers near the smallest ones are slow.
_FAR = 60.0

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Problem:
    """Values and costs of every option, first as a group above the deepest one (inner), then as the deepest (last).

    Attributes
    ----------
    value : array, shape (2, N, K)
    cost : array, shape (2, N, K, D)
        In units of the D limits that are finite.
    allowed : array of bool, shape (2, N, K)
    base : array, shape (N,)
        Value that comes with reaching a depth.
    room : array, shape (N, D)
        What each limit leaves when the path to a depth is paid; minus infinity for depths out of reach.
    damage : array, shape (N, K)
        Share of the deeper groups' value that an option loses.
    kept : array, shape (N,)
        Share of a group's value that the groups above it are taken to leave.
    """

    value: _Floats
    cost: _Floats
    allowed: _Bools
    base: _Floats
    room: _Floats
    damage: _Floats
    kept: _Floats

    @property
    def reachable(self) -> _Bools:
        """Depths that can be had at all, shape (N,)."""
        return np.asarray(np.isfinite(self.room).all(axis=-1))

    @property
    def least(self) -> _Floats:
        """The least of each cost among a group's options, shape (2, N, D)."""
        least: _Floats = np.where(self.allowed[..., None], self.cost, np.inf).min(axis=2)
        return least

    @property
    def needed(self) -> _Floats:
        """The least of each cost that the groups above each one take, shape (N, D)."""
        return _above(self.least[0])

    def within(self, depths: _Bools) -> Problem:
        """Return the problem without options that fit above none of these depths, beside the cheapest others."""
        slack, (inner, last) = np.full_like(self.room, -np.inf), self.least
        slack[depths] = self.room[depths] - (self.needed + last)[depths]
        deeper = np.maximum.accumulate(slack[::-1])[::-1]
        most = np.concatenate([deeper[1:], np.full((1, slack.shape[1]), -np.inf)])
        fits = (self.cost[0] - inner[:, None] <= most[:, None] + _ROUNDING).all(axis=-1)
        return replace(self, allowed=np.stack([self.allowed[0] & fits, self.allowed[1]]))


def _above(of_groups: _Floats) -> _Floats:
    """Return the sums over the groups above each one, shape (N, ...)."""
    return np.concatenate([np.zeros_like(of_groups[:1]), np.cumsum(of_groups, axis=0)[:-1]])


def problem_of(choices: Choices, limits: Limits, *, least: str | None = None) -> Problem:
    """Return the tables of a choice, without regard to damage.

    Parameters
    ----------
    choices, limits
        What is chosen from, and within what.
    least : str, optional
        Name of a cost; if given, the value to maximise is minus this cost.
    """
    open_to = choices.available.copy()
    for name in COSTS:
        open_to &= np.isfinite(np.where(open_to, getattr(choices, name), 0.0))
    allowed = np.stack([open_to, open_to])
    allowed[:, :, 0] = [[True], [False]]
    allowed[0, list(choices.forced), 0] = False
    change = np.where(open_to, choices.path_change, 0.0)
    cost = {name: np.stack([np.where(open_to, getattr(choices, name), 0.0)] * 2) for name in COSTS}
    cost["seconds"][0] += change
    path = {name: np.cumsum(getattr(choices, f"path_{name}")) for name in ("seconds", "memory")}
    path["uplink"] = np.zeros(len(open_to))
    reachable = np.isfinite(path["seconds"]) & np.isfinite(path["memory"])
    reachable[: max(choices.forced, default=0)] = False
    limit = {name: limits.with_slack(name) for name in COSTS if limits.with_slack(name) < np.inf}
    unit = {name: _unit(limit[name], cost[name][1]) for name in limit}
    # Without any limit, one cost that nobody has keeps the shapes regular.
    costs = [cost[name] / unit[name] for name in limit] or [np.zeros(allowed.shape)]
    room = [(limit[name] - path[name]) / unit[name] for name in limit] or [np.ones(len(change))]
    base, value = np.zeros(len(change)), np.stack([np.where(open_to, choices.value, 0.0)] * 2)
    if least is not None:
        base, value = -path[least], -cost[least]
    problem = Problem(
        value=value,
        cost=np.stack(costs, -1),
        allowed=allowed,
        base=np.where(reachable, base, 0.0),
        room=np.where(reachable[:, None], np.stack(room, -1), -np.inf),
        damage=np.zeros_like(change),
        kept=np.ones(len(change)),
    )
    fits = np.asarray((problem.room >= problem.needed + problem.least[1]).all(axis=-1))
    return replace(problem, room=np.where(fits[:, None], problem.room, -np.inf))


def _unit(limit: float, cost: _Floats) -> float:
    largest = float(np.abs(cost).max(initial=0.0))
    return max(abs(limit) if limit > -np.inf else 0.0, _LEAST_UNIT * largest) or 1.0


def bounds_above(problem: Problem, prices: _Floats) -> _Floats:
    """Return what the groups above each one are worth at most, less their costs at some prices.

    Parameters
    ----------
    prices : array, shape (P, D)

    Returns
    -------
    array, shape (N, P)
    """
    return _above(_best(problem, prices)[0])


def bounds_of_depths(problem: Problem, prices: _Floats) -> _Floats:
    """Return the Lagrangian bound of all depths at some prices, shape (N, P); minus infinity out of reach."""
    inner, last = _best(problem, prices)
    reachable = problem.reachable[:, None]
    room = np.where(reachable, problem.room, 0.0) @ prices.T
    return np.where(reachable, problem.base[:, None] + _above(inner) + last + room, -np.inf)


def _best(problem: Problem, prices: _Floats) -> _Floats:
    """Return what each group is worth at most, less its cost at some prices, shape (2, N, P)."""
    value = np.where(problem.allowed, problem.value, -np.inf)[..., None]
    best: _Floats = (value - problem.cost @ prices.T).max(axis=2)
    return best


def lane(problem: Problem, depth: int) -> tuple[_Floats, _Floats, _Floats] | None:
    """Return values, costs and room of the options that fit where one depth is the deepest; None if none do.

    The cheapest option of every group costs nothing. An option that does not fit beside these is struck out, and
    has a value of minus infinity.
    """
    value, cost, allowed = (
        np.concatenate([inner[:depth], last[depth : depth + 1]])
        for inner, last in (problem.value, problem.cost, problem.allowed)
    )
    room = problem.room[depth]
    while True:
        cheapest = np.where(allowed[..., None], cost, np.inf).min(axis=1, keepdims=True)
        cost = np.where(allowed[..., None], cost - cheapest, 0.0)
        room = room - cheapest.sum(axis=(0, 1))
        too_dear = allowed & (cost > room).any(axis=-1)
        allowed = allowed & ~too_dear
        if not allowed.any(axis=1).all():
            return None
        if not too_dear.any():
            return np.where(allowed, value, -np.inf), cost, room


def best_prices(value: _Floats, cost: _Floats, room: _Floats) -> tuple[_Floats, float]:
    """Return prices that nearly minimise the bound of one depth, shape (D,), and this bound."""
    unit = np.where(room > 0, room, 1.0)
    cost, allowed = cost / unit, np.isfinite(value)
    worst = np.where(allowed, value, np.inf).min(axis=1)
    stake = float((value.max(axis=1) - worst).sum()) or 1.0
    groups, dims = max(int((allowed.sum(axis=1) > 1).sum()), 1), len(room)
    prices = np.full(dims, stake / (2 * dims))
    best, lowest, share = prices, np.inf, _FIRST
    for _ in range(_STEPS):
        smooth = share * stake / groups
        reduced = value - cost @ prices
        top = reduced.max(axis=1, keepdims=True)
        bound = float(prices.sum() + top.sum())
        if bound < lowest:
            best, lowest = prices, bound
        weight = np.exp(np.maximum((reduced - top) / smooth, -_FAR))
        weight /= weight.sum(axis=1, keepdims=True)
        mean = (weight[..., None] * cost).sum(axis=1)
        # In shares of the present prices, which may differ by many powers of ten.
        slope = prices * (1.0 - mean.sum(axis=0)) - smooth
        curve = np.einsum("nk,nkd,nke->de", weight, cost, cost) - mean.T @ mean
        curve = prices[:, None] * curve * prices / smooth + smooth * np.eye(dims)
        step = np.linalg.solve(curve, -slope)
        decrement = np.sqrt(max(-float(slope @ step) / smooth, 0.0)) / np.sqrt(groups)
        prices = prices * np.clip(1.0 + step / (1.0 + decrement), 1 / _LEAP, _LEAP)
        if decrement < 1.0:
            share = max(share * _SHRINK, _LAST)
    return np.where(room > 0, best / unit, 0.0), lowest
