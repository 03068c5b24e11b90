"""The multiple-choice problem as tables, and an upper bound for each depth: the Lagrangian bound.

An option of the deepest trained group costs more than the same option of a group above it, because of the path.
Costs are in units of their limit, and costs without a limit are left out. With a price on each cost, every group
chooses independently, and ``bound = prices @ room + sum over groups of max over options of (value - prices @
cost)`` is never below the optimum, whatever the prices. The best prices minimise this convex function. It is
smoothed (a log-sum-exp per group, and a logarithmic barrier that keeps prices positive) and minimised by Newton
steps; the smoothing is reduced as they converge, as in interior-point methods (Boyd and Vandenberghe, Convex
Optimization, 11.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.multiple_choice.choices import COSTS, ChoiceLimits, Choices

# A limit far below the largest cost is not a usable unit.
_LEAST_UNIT = 1e-9
# Smoothing, as a share of the value at stake per group: the first, the last, and the factor between.
_FIRST, _LAST, _SHRINK = 0.25, 1e-3, 0.5
# Most Newton steps, the largest factor by which one step changes a price, and the Newton decrement at convergence.
_STEPS, _LEAP, _SETTLED = 30, 4.0, 1e-4
_ROUNDING = 1e-12
# Weights below exp(-60) are negligible, and arithmetic with denormal numbers is slow.
_FAR = 60.0

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Problem:
    """Values and costs of every option, for groups above the deepest trained one (inner) and for that one (last).

    Costs of reaching a depth, such as the path to it, are part of the options of the last group.

    Attributes
    ----------
    value : array, shape (2, N, K)
    cost : array, shape (2, N, K, D)
        In units of the D finite limits.
    allowed : array of bool, shape (2, N, K)
        Options that may be chosen; a group that cannot be the deepest has no last option.
    room : array, shape (D,)
        The limits.
    """

    value: _Floats
    cost: _Floats
    allowed: _Bools
    room: _Floats

    @property
    def least(self) -> _Floats:
        """The least of each cost among a group's options, shape (2, N, D)."""
        return np.asarray(np.where(self.allowed[..., None], self.cost, np.inf).min(axis=2))

    @property
    def needed(self) -> _Floats:
        """For each group, the least of each cost that all groups above it need together, shape (N, D)."""
        return _above(self.least[0])


def _above(of_groups: _Floats) -> _Floats:
    """Return for each group the sum over the groups above it, shape (N, ...)."""
    return np.concatenate([np.zeros_like(of_groups[:1]), np.cumsum(of_groups, axis=0)[:-1]])


def problem_of(choices: Choices, limits: ChoiceLimits, *, least: str | None = None) -> Problem:
    """Return the tables of a choice.

    Parameters
    ----------
    choices, limits
        The options, and their limits.
    least : str, optional
        Name of a cost; if given, the value to maximise is minus this cost.
    """
    path = {name: np.cumsum(getattr(choices, f"path_{name}")) for name in ("seconds", "memory")}
    path["uplink"] = np.zeros(len(choices.value))
    reachable = np.isfinite(path["seconds"]) & np.isfinite(path["memory"])
    reachable[: max(choices.forced, default=0)] = False
    open_to = choices.available.copy()
    for name in COSTS:
        open_to &= np.isfinite(np.where(open_to, getattr(choices, name), 0.0))
    allowed = np.stack([open_to, open_to & reachable[:, None]])
    allowed[:, :, 0] = [[True], [False]]
    allowed[0, list(choices.forced), 0] = False
    cost = {}
    for name in COSTS:
        own = np.where(open_to, getattr(choices, name), 0.0)
        cost[name] = np.stack([own, own + np.where(reachable, path[name], 0.0)[:, None]])
    value = np.stack([np.where(open_to, choices.value, 0.0)] * 2)
    limit = {name: limits.with_slack(name) for name in COSTS if limits.with_slack(name) < np.inf}
    unit = {name: _unit(limit[name], cost[name]) for name in limit}
    problem = Problem(
        value=value if least is None else -cost[least],
        # Without any limit, a single cost of zero keeps the shapes regular.
        cost=np.stack([cost[name] / unit[name] for name in limit] or [0.0 * value], -1),
        allowed=allowed,
        room=np.array([limit[name] / unit[name] for name in limit] or [1.0]),
    )
    allowed[1] &= (problem.needed + problem.least[1] <= problem.room).all(axis=-1)[:, None]
    return problem


def _unit(limit: float, cost: _Floats) -> float:
    largest = float(np.abs(cost).max(initial=0.0))
    return max(abs(limit) if limit > -np.inf else 0.0, _LEAST_UNIT * largest) or 1.0


def bounds_above(problem: Problem, prices: _Floats) -> _Floats:
    """Return the largest worth minus priced costs of all groups above each group, shape (N, P)."""
    return _above(_best(problem, prices)[0])


def bounds_of_depths(problem: Problem, prices: _Floats) -> _Floats:
    """Return the Lagrangian bound of all depths at the prices, shape (N, P); -inf for an impossible depth."""
    inner, last = _best(problem, prices)
    reachable = np.isfinite(last)
    return np.where(reachable, _above(inner) + last + prices @ problem.room, -np.inf)


def _best(problem: Problem, prices: _Floats) -> _Floats:
    """Return each group's largest worth less cost at the prices (P, D), shape (2, N, P)."""
    value = np.where(problem.allowed, problem.value, -np.inf)[..., None]
    return np.asarray((value - problem.cost @ prices.T).max(axis=2))


def lane(problem: Problem, depth: int) -> tuple[_Floats, _Floats, _Floats] | None:
    """Return values, costs and room of the options with one depth as the deepest; None if none fits.

    The least cost of every group is subtracted from its options and from the room. An option that then does not fit
    has a value of minus infinity.
    """
    value, cost, allowed = (
        np.concatenate([inner[:depth], last[depth : depth + 1]])
        for inner, last in (problem.value, problem.cost, problem.allowed)
    )
    cheapest = np.where(allowed[..., None], cost, np.inf).min(axis=1, keepdims=True)
    cost = np.where(allowed[..., None], cost - cheapest, 0.0)
    room = problem.room - cheapest.sum(axis=(0, 1))
    allowed &= (cost <= room).all(axis=-1)
    if not allowed.any(axis=1).all():
        return None
    return np.where(allowed, value, -np.inf), np.where(allowed[..., None], cost, 0.0), room


def best_prices(value: _Floats, cost: _Floats, room: _Floats) -> tuple[_Floats, float]:
    """Return prices that nearly minimise the bound of one depth, shape (D,), and this bound."""
    unit = np.where(room > 0, room, 1.0)
    cost, allowed = cost / unit, np.isfinite(value)
    worst = np.where(allowed, value, np.inf).min(axis=1)
    stake = float((value.max(axis=1) - worst).sum()) or 1.0
    groups, dims = max(int((allowed.sum(axis=1) > 1).sum()), 1), len(room)
    prices = np.full(dims, stake / (2 * dims))
    best, lowest, share = prices, np.inf, _FIRST
    flat = cost.reshape(-1, dims)
    for _ in range(_STEPS):
        smooth = share * stake / groups
        reduced = value - cost @ prices
        top = reduced.max(axis=1, keepdims=True)
        bound = float(prices.sum() + top.sum())
        if bound < lowest:
            best, lowest = prices, bound
        weight = np.exp(np.maximum((reduced - top) / smooth, -_FAR))
        weight /= weight.sum(axis=1, keepdims=True)
        weighted = weight[..., None] * cost
        mean = weighted.sum(axis=1)
        # Derivatives relative to the present prices, which may differ by many powers of ten.
        slope = prices * (1.0 - mean.sum(axis=0)) - smooth
        curve = weighted.reshape(-1, dims).T @ flat - mean.T @ mean
        curve = prices[:, None] * curve * prices / smooth
        # If nothing fits, prices grow without bound and would make the barrier negligible.
        curve += (smooth + _ROUNDING * np.trace(curve)) * np.eye(dims)
        step = np.linalg.solve(curve, -slope)
        decrement = np.sqrt(max(-float(slope @ step) / smooth, 0.0)) / np.sqrt(groups)
        prices = prices * np.clip(1.0 + step / (1.0 + decrement), 1 / _LEAP, _LEAP)
        if share <= _LAST and decrement < _SETTLED:
            break
        if decrement < 1.0:
            share = max(share * _SHRINK, _LAST)
    return np.where(room > 0, best / unit, 0.0), lowest
