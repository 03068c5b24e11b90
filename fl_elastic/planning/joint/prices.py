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

from fl_elastic.planning.joint.lanes import Lanes, Problem

__all__ = ["best_prices", "bounds_of_depths", "losses", "unit_prices"]

_Floats = NDArray[np.float64]

# Smoothing, in shares of the value at stake per group: the first, the last, and what it shrinks by.
_FIRST, _LAST, _SHRINK = 0.25, 1e-3, 0.4
_STEPS = 26
# The smoothing shrinks once the Newton decrement is below the first, and steps with one above the second are cut;
# both are for up to so many open groups, and grow with the root of their number.
_CENTRED, _LONG, _GROUPS = 1.4, 2.0, 40.0
# A price changes by no more than this factor per step.
_LEAP = 8.0
# A move is cut if the slope at its end is above this share of the one at its start, to no less than so much of it.
_TURNED, _LEAST_CUT = 0.9, 0.1
_TINY = 1e-300
# Weights below exp(-60) mean nothing, and numbers near the smallest ones are slow.
_FAR = 60.0


def bounds_of_depths(problem: Problem, prices: _Floats) -> _Floats:
    """Return the Lagrangian bound of all depths at some prices.

    Parameters
    ----------
    prices : array, shape (P, D)

    Returns
    -------
    array, shape (N, P)
        Minus infinity for depths out of reach.
    """

    def best(value: _Floats, cost: _Floats, allowed: NDArray[np.bool_]) -> _Floats:
        reduced = np.where(allowed, value, -np.inf)[..., None] - cost @ prices.T
        result: _Floats = reduced.max(axis=1)
        return result

    inner = best(problem.inner_value, problem.inner_cost, problem.inner_allowed)
    last = best(problem.last_value, problem.last_cost, problem.last_allowed)
    above = np.zeros_like(inner)
    np.cumsum(inner[:-1], axis=0, out=above[1:])
    reachable = problem.reachable[:, None]
    room = np.where(reachable, problem.room, 0.0) @ prices.T
    return np.where(reachable, problem.base[:, None] + above + last + room, -np.inf)


def best_prices(lanes: Lanes) -> _Floats:
    """Return prices that nearly minimise the Lagrangian bound of each lane, shape (L, D).

    Prices are per room of the lane.
    """
    open_groups = np.flatnonzero((lanes.allowed.sum(axis=-1) > 1).any(axis=0))
    count, dims = len(lanes), lanes.cost.shape[-1]
    # Groups last: numpy is several times faster along long rows than along the few options.
    value = np.ascontiguousarray(lanes.value[:, open_groups].swapaxes(1, 2))
    cost = np.ascontiguousarray(lanes.cost[:, open_groups].transpose(0, 3, 2, 1))
    flat_cost = cost.reshape(count, dims, -1)
    stake, free = _stake(lanes)
    prices = np.repeat(stake[:, None] / (2 * dims), dims, axis=1)
    best, lowest = prices, np.full(count, np.inf)
    diagonal = np.arange(dims)
    share = np.full(count, _FIRST)
    start, moved, before = prices, np.zeros_like(prices), np.zeros(count)
    back = np.zeros(count, dtype=bool)
    scale = np.sqrt(np.maximum(free / _GROUPS, 1.0))
    for _ in range(_STEPS):
        smooth = share * stake / free
        reduced = value - (prices[:, None, :] @ flat_cost).reshape(value.shape)
        top = reduced.max(axis=1, keepdims=True)
        bound = prices.sum(axis=-1) + top.sum(axis=(1, 2))
        better = bound < lowest
        lowest = np.where(better, bound, lowest)
        best = np.where(better[:, None], prices, best)
        weight = np.exp(np.maximum((reduced - top) / smooth[:, None, None], -_FAR))
        weight /= weight.sum(axis=1, keepdims=True)
        weighted = weight[:, None] * cost
        mean = weighted.sum(axis=2)
        spread = weighted.reshape(flat_cost.shape) @ flat_cost.swapaxes(1, 2)
        spread -= mean @ mean.swapaxes(1, 2)
        slope = 1.0 - mean.sum(axis=-1) - smooth[:, None] / prices
        curve = spread / smooth[:, None, None]
        curve[:, diagonal, diagonal] += smooth[:, None] / prices**2
        step = np.linalg.solve(curve, -slope[..., None])[..., 0]
        decrement = np.sqrt(np.maximum(-(slope * step).sum(axis=-1) / smooth, 0.0)) / scale
        step /= 1.0 + (scale * np.maximum(decrement - _LONG, 0.0))[:, None]
        # Where the slope along the last move has turned, the move was too long: cut it once, by the secant rule.
        after = (slope * moved).sum(axis=-1)
        back = (after > _TURNED * before) & ~back
        cut = np.maximum(before / np.maximum(before + after, _TINY), _LEAST_CUT)
        start = np.where(back[:, None], start, prices)
        leap = np.clip(prices + step, prices / _LEAP, prices * _LEAP) - prices
        moved = np.where(back[:, None], moved * cut[:, None], leap)
        before = np.where(back, before * cut, -(slope * leap).sum(axis=-1))
        prices = start + moved
        shrunk = np.maximum(share * _SHRINK, _LAST)
        share = np.where((decrement < _CENTRED) & ~back, shrunk, share)
    return best


def _stake(lanes: Lanes) -> tuple[_Floats, _Floats]:
    """Return the value that can be won or lost in each lane, and the number of its open groups."""
    worst = np.where(lanes.allowed, lanes.value, np.inf).min(axis=-1)
    stake = (lanes.value.max(axis=-1) - worst).sum(axis=-1)
    free = np.maximum((lanes.allowed.sum(axis=-1) > 1).sum(axis=-1), 1)
    return np.where(stake > 0, stake, 1.0), free


def unit_prices(lanes: Lanes, prices: _Floats) -> _Floats:
    """Return prices per unit of the limits, from prices per room of each lane, shape (L, D)."""
    return np.divide(prices, lanes.room, out=np.zeros_like(prices), where=lanes.room > 0)


def losses(lanes: Lanes, prices: _Floats) -> tuple[_Floats, _Floats]:
    """Return each lane's bounds at its prices, and what each option takes away from them.

    Parameters
    ----------
    prices : array, shape (L, P, D)

    Returns
    -------
    bounds : array, shape (L, P)
    losses : array, shape (L, N, K, P)
        Not negative; infinite for options that are not allowed.
    """
    count, groups, options, dims = lanes.cost.shape
    charge = lanes.cost.reshape(count, groups * options, dims) @ prices.swapaxes(1, 2)
    reduced = lanes.value[..., None] - charge.reshape(count, groups, options, -1)
    top = reduced.max(axis=2, keepdims=True)
    bounds = lanes.base[:, None] + prices.sum(axis=-1) + top.sum(axis=(1, 2))
    return bounds, top - reduced
