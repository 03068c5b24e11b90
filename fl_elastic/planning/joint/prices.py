"""Prices for seconds and bytes: the Lagrangian bound of every depth.

With a price on each cost, every group chooses alone, and
``bound = prices @ room + sum over groups of max over options of (value - prices @ cost)``
is never below the optimum, whatever the prices. The best prices minimise this convex function. It is smoothed (a
log-sum-exp per group, and a logarithmic barrier that keeps prices positive) and minimised by Newton steps; the
smoothing is taken back as they converge, as in interior-point methods (Boyd and Vandenberghe, Convex
Optimization, 11.3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.problem import Problem

__all__ = ["best_prices", "bounds_above", "bounds_of_depths", "lane"]

_Floats = NDArray[np.float64]

# Smoothing, in shares of the value at stake per group: the first, the last, and what it shrinks by.
_FIRST, _LAST, _SHRINK = 0.25, 1e-3, 0.5
_STEPS = 30
# A price changes by no more than this factor per step.
_LEAP = 4.0
# Weights below exp(-60) mean nothing, and numbers near the smallest ones are slow.
_FAR = 60.0


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
