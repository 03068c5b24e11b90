"""The search of the joint solver: options are decided group by group, from the deepest one towards the loss.

A state is what is decided so far: its value, and the room that it leaves. Prices on the costs say how good it can
still become. States that cannot beat the best known answer, or no longer fit, are dropped. Of the others those are
kept that promise most; as long as none has to go, the search is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.choices import Choices, Limits
from fl_elastic.planning.joint.problem import (
    Problem,
    best_prices,
    bounds_above,
    bounds_of_depths,
    lane,
)

__all__ = ["Best", "priced", "solve", "sweep"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.intp]

# Up to this many groups nothing short of the optimum is good enough.
_FEW_GROUPS = 16
_TOLERANCE, _TOLERANCE_OF_ONE_COST, _TOLERANCE_OF_FEW_GROUPS = 2e-3, 1e-5, 1e-9
# States that are kept, sweep after sweep, until the bound is met.
_STATES, _STATES_OF_ONE_COST = (100, 1000), (300, 3000, 20_000)
_ANSWERS = 8
# Room below zero by rounding alone still counts as room.
_ROUNDING = 1e-12
# What prices are raised by until the room is kept, and how far they are moved to judge states of unlike room.
_RAISES = (1.0, 1.01, 1.02, 1.04, 1.08, 1.15, 1.3, 1.6, 2.5, 5.0)
_SPREAD = 1.6
_PRICED = 8


@dataclass(eq=False)
class Best:
    """The best choice so far within the limits: of largest value, or least of the cost that is named."""

    choices: Choices
    limits: Limits
    least: str | None = None
    value: float = -np.inf
    options: _Ints | None = None

    def offer(self, options: _Ints) -> bool:
        """Take over a choice if it is allowed and better."""
        totals = self.choices.totals(options)
        value = totals.value if self.least is None else -float(getattr(totals, self.least))
        if not self.limits.admit(totals) or value <= self.value:
            return False
        self.value, self.options = value, options.copy()
        return True

    def offer_nothing(self) -> None:
        """Offer to train nothing, where nothing is forced."""
        if not self.choices.forced:
            self.offer(np.zeros(len(self.choices.value), dtype=np.intp))


def solve(problem: Problem, best: Best, *, tolerance: float | None = None) -> float:
    """Improve the best choice until the bound is met or the work is done; return the bound."""
    one = problem.room.shape[1] == 1
    if tolerance is None:
        tolerance = _TOLERANCE_OF_ONE_COST if one else _TOLERANCE
        if len(problem.base) <= _FEW_GROUPS:
            tolerance = _TOLERANCE_OF_FEW_GROUPS
    prices, promise = priced(problem, best)
    bound = float(promise.max(initial=-np.inf))
    for states in _STATES_OF_ONE_COST if one else _STATES:
        goal = best.value
        if np.isfinite(goal):
            goal += tolerance * abs(goal)
        if not bound > goal:
            break
        answers, dropped = sweep(problem, prices, promise, states, goal)
        for options in answers:
            best.offer(options)
        # What was pruned could not reach the goal.
        bound = min(bound, max(goal, dropped))
        if dropped <= goal:
            break
    return max(bound, best.value)


def priced(problem: Problem, best: Best) -> tuple[_Floats, _Floats]:
    """Return prices that suit the depths that promise most, and the bound of every depth; offer fair choices.

    Returns
    -------
    prices : array, shape (P, D)
    promise : array, shape (N,)
        Minus infinity for depths that cannot be had.
    """
    prices = np.zeros((1, problem.room.shape[1]))
    promise = bounds_of_depths(problem, prices)[:, 0]
    left, most = np.isfinite(promise), None
    while len(prices) < _PRICED and (left & (promise > best.value)).any():
        depth = int(np.where(left, promise, -np.inf).argmax())
        left[depth] = False
        known = lane(problem, depth)
        if known is None:
            promise[depth] = -np.inf
            continue
        found, own = best_prices(*known)
        prices = np.concatenate([prices, found[None]])
        promise = np.minimum(promise, bounds_of_depths(problem, prices[-1:])[:, 0])
        promise[depth] = min(promise[depth], problem.base[depth] + own)
        most = found if most is None or promise[depth] >= promise.max() else most
        options = _rounded(*known, found)
        if options is not None:
            best.offer(np.pad(options, (0, len(promise) - len(options))))
    return (prices if most is None else np.concatenate([prices, _moved(most)])), promise


def _moved(prices: _Floats) -> _Floats:
    """Return prices with each of them moved up and down, shape (2 D, D)."""
    own = np.eye(len(prices), dtype=bool)
    factors = [np.where(own, by, 1.0) for by in (_SPREAD, 1 / _SPREAD)]
    return np.asarray(prices * np.concatenate(factors))


def _rounded(value: _Floats, cost: _Floats, room: _Floats, prices: _Floats) -> _Ints | None:
    """Return the options that are best at just high enough prices; None if no factor is enough."""
    groups, charge = np.arange(len(value)), cost @ prices
    for factor in _RAISES:
        options: _Ints = (value - factor * charge).argmax(axis=1)
        if (cost[groups, options].sum(axis=0) <= room + _ROUNDING).all():
            return options
    return None


def sweep(
    problem: Problem, prices: _Floats, promise: _Floats, states: int, goal: float
) -> tuple[list[_Ints], float]:
    """Go over all groups once, from the deepest towards the loss.

    Parameters
    ----------
    problem : Problem
    prices : array, shape (P, D)
        By which states are judged: by the price that promises least.
    promise : array, shape (N,)
        Bounds of all depths.
    states : int
        Most that are kept after each group.
    goal : float
        What a state must promise more than.

    Returns
    -------
    answers : list of array
        The best choices.
    dropped : float
        What was dropped because of the cap could still have been worth.
    """
    begins = promise > goal
    problem = problem.within(begins)
    groups, dims = problem.room.shape
    above, needed = bounds_above(problem, prices), problem.needed
    one_cost = dims == 1 and not problem.damage.any()
    value, room, dropped = np.zeros(0), np.zeros((0, dims)), -np.inf
    history: list[tuple[int, _Ints, _Ints]] = []
    for group in range(int(np.flatnonzero(begins).max(initial=-1)), -1, -1):
        inner = np.flatnonzero(problem.allowed[0, group])
        last = np.flatnonzero(problem.allowed[1, group] & begins[group])
        share = 1.0 - problem.damage[group, inner]
        going_on = problem.value[0, group, inner] + share * value[:, None]
        begun = problem.base[group] + problem.value[1, group, last]
        values = np.concatenate([going_on.ravel(), begun])
        left = (room[:, None] - problem.cost[0, group, inner]).reshape(-1, dims)
        rooms = np.concatenate([left, problem.room[group] - problem.cost[1, group, last]])
        parent = np.concatenate(
            [np.repeat(np.arange(len(value)), len(inner)), np.full(len(last), -1)]
        )
        option = np.concatenate([np.tile(inner, len(value)), last])
        reach = problem.kept[group] * values + (rooms @ prices.T + above[group]).min(axis=1)
        fits = (rooms >= needed[group] - _ROUNDING).all(axis=-1) & (reach > goal)
        chosen = np.flatnonzero(fits)
        if one_cost:
            chosen = chosen[_undominated(rooms[chosen, 0], values[chosen])]
        if len(chosen) > states:
            order = chosen[_most_promising(reach[chosen], rooms[chosen], states)]
            out = np.setdiff1d(chosen, order, assume_unique=True)
            dropped, chosen = max(dropped, float(reach[out].max())), order
        value, room = values[chosen], rooms[chosen]
        history.append((group, parent[chosen], option[chosen]))
    best = np.argsort(-value, kind="stable")[:_ANSWERS].tolist()
    return [_traced(history, state, groups) for state in best], dropped


def _undominated(room: _Floats, value: _Floats) -> _Ints:
    """Return the states of one cost that no state of more room equals in value."""
    if not len(value):
        return np.zeros(0, dtype=np.intp)
    order = np.lexsort((-value, -room))
    best = np.maximum.accumulate(value[order])
    kept: _Ints = order[np.concatenate([[True], value[order][1:] > best[:-1]])]
    return kept


def _most_promising(reach: _Floats, room: _Floats, states: int) -> _Ints:
    """Return the states of largest bound; of one cost those at every level of it.

    Where worth follows cost, all bounds are alike, and what matters is that every cost can be completed.
    """
    if room.shape[1] > 1:
        most: _Ints = np.argpartition(-reach, states)[:states]
        return most
    low, high = room.min(), room.max()
    level = np.minimum(
        ((room[:, 0] - low) / max(high - low, 1e-300) * states).astype(np.int64), states - 1
    )
    order = np.lexsort((-reach, level))
    first: _Ints = order[np.flatnonzero(np.diff(level[order], prepend=-1))]
    return first


def _traced(history: list[tuple[int, _Ints, _Ints]], state: int, groups: int) -> _Ints:
    options = np.zeros(groups, dtype=np.intp)
    for group, parent, option in reversed(history):
        options[group] = option[state]
        state = int(parent[state])
        if state < 0:
            break
    return options
