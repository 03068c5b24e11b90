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
    """Values and costs of every option, as a group above the deepest one (inner) or as the deepest (last).

    Attributes
    ----------
    inner_value, last_value : array, shape (N, K)
    inner_cost, last_cost : array, shape (N, K, D)
        In units of the D limits that are finite.
    inner_allowed, last_allowed : array of bool, shape (N, K)
    base : array, shape (N,)
        Value that comes with reaching a depth.
    room : array, shape (N, D)
        What each limit leaves when the path to a depth is paid; minus infinity for depths out of reach.
    damage : array, shape (N, K)
        Share of the deeper groups' value that an option loses.
    kept : array, shape (N,)
        Share of a group's value that the groups above it are taken to leave.
    """

    inner_value: _Floats
    last_value: _Floats
    inner_cost: _Floats
    last_cost: _Floats
    inner_allowed: _Bools
    last_allowed: _Bools
    base: _Floats
    room: _Floats
    damage: _Floats
    kept: _Floats

    @property
    def reachable(self) -> _Bools:
        """Depths that can be had at all, shape (N,)."""
        return np.asarray(np.isfinite(self.room).all(axis=-1))

    @property
    def needed(self) -> _Floats:
        """The least of each cost that the groups above each one take, shape (N, D)."""
        cheapest = _least(self.inner_cost, self.inner_allowed)
        return np.concatenate([np.zeros((1, cheapest.shape[1])), np.cumsum(cheapest, axis=0)[:-1]])

    @property
    def least(self) -> _Floats:
        """The least of each cost with which each depth can be had, shape (N, D)."""
        return self.needed + _least(self.last_cost, self.last_allowed)

    def within(self, depths: _Bools) -> Problem:
        """Return the problem without options that fit above none of these depths, beside the cheapest others."""
        slack = np.full_like(self.room, -np.inf)
        slack[depths] = self.room[depths] - self.least[depths]
        deeper = np.maximum.accumulate(slack[::-1])[::-1]
        most = np.concatenate([deeper[1:], np.full((1, slack.shape[1]), -np.inf)])
        more = self.inner_cost - _least(self.inner_cost, self.inner_allowed)[:, None]
        fits = (more <= most[:, None] + _ROUNDING).all(axis=-1)
        return replace(self, inner_allowed=self.inner_allowed & fits)


def _least(cost: _Floats, allowed: _Bools) -> _Floats:
    """Return the least of each cost among a group's options, shape (N, D)."""
    least: _Floats = np.where(allowed[..., None], cost, np.inf).min(axis=1)
    return least


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
    inner, last = open_to.copy(), open_to.copy()
    inner[:, 0], last[:, 0] = True, False
    inner[list(choices.forced), 0] = False
    own = {name: np.where(open_to, getattr(choices, name), 0.0) for name in COSTS}
    change = np.where(open_to, choices.path_change, 0.0)
    above = own | {"seconds": own["seconds"] + change}
    path = {name: np.cumsum(getattr(choices, f"path_{name}")) for name in ("seconds", "memory")}
    path["uplink"] = np.zeros(len(open_to))
    reachable = np.isfinite(path["seconds"]) & np.isfinite(path["memory"])
    reachable[: max(choices.forced, default=0)] = False
    limit = {name: limits.with_slack(name) for name in COSTS if limits.with_slack(name) < np.inf}
    unit = {name: _unit(limit[name], own[name]) for name in limit}
    # Without any limit, one cost that nobody has keeps the shapes regular.
    nothing = [] if limit else [np.zeros_like(change)]
    room = [(limit[name] - path[name]) / unit[name] for name in limit] or [np.ones(len(change))]
    base, last_value = np.zeros(len(change)), np.where(open_to, choices.value, 0.0)
    inner_value = last_value
    if least is not None:
        base, last_value, inner_value = -path[least], -own[least], -above[least]
    problem = Problem(
        inner_value=inner_value,
        last_value=last_value,
        inner_cost=np.stack([above[name] / unit[name] for name in limit] + nothing, -1),
        last_cost=np.stack([own[name] / unit[name] for name in limit] + nothing, -1),
        inner_allowed=inner,
        last_allowed=last,
        base=np.where(reachable, base, 0.0),
        room=np.where(reachable[:, None], np.stack(room, -1), -np.inf),
        damage=np.zeros_like(change),
        kept=np.ones(len(change)),
    )
    fits = np.asarray((problem.room >= problem.least).all(axis=-1))
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
    inner = _best(problem.inner_value, problem.inner_cost, problem.inner_allowed, prices)
    return np.concatenate([np.zeros((1, len(prices))), np.cumsum(inner, axis=0)[:-1]])


def bounds_of_depths(problem: Problem, prices: _Floats) -> _Floats:
    """Return the Lagrangian bound of all depths at some prices, shape (N, P); minus infinity out of reach."""
    last = _best(problem.last_value, problem.last_cost, problem.last_allowed, prices)
    reachable = problem.reachable[:, None]
    room = np.where(reachable, problem.room, 0.0) @ prices.T
    bounds = problem.base[:, None] + bounds_above(problem, prices) + last + room
    return np.where(reachable, bounds, -np.inf)


def _best(value: _Floats, cost: _Floats, allowed: NDArray[np.bool_], prices: _Floats) -> _Floats:
    reduced = np.where(allowed, value, -np.inf)[..., None] - cost @ prices.T
    best: _Floats = reduced.max(axis=1)
    return best


def lane(problem: Problem, depth: int) -> tuple[_Floats, _Floats, _Floats] | None:
    """Return values, costs and room of the options that fit where one depth is the deepest; None if none do.

    The cheapest option of every group costs nothing. An option that does not fit beside these is struck out, and
    has a value of minus infinity.
    """
    value = np.concatenate([problem.inner_value[:depth], problem.last_value[depth : depth + 1]])
    cost = np.concatenate([problem.inner_cost[:depth], problem.last_cost[depth : depth + 1]])
    allowed = np.concatenate(
        [problem.inner_allowed[:depth], problem.last_allowed[depth : depth + 1]]
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
