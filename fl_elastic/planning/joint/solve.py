"""The best-first walk over depths that closes the gap between the best known choice and the bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.choices import Choices, Limits
from fl_elastic.planning.joint.lanes import Problem, fixed, lanes_of
from fl_elastic.planning.joint.prices import best_prices, bounds_of_depths, unit_prices
from fl_elastic.planning.joint.search import Priced, price, rounded, sweep

__all__ = ["Best", "judge_of", "solve"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.intp]

# Up to this many groups nothing short of the optimum is good enough.
_FEW_GROUPS = 16
_TOLERANCE, _TOLERANCE_OF_ONE_COST, _TOLERANCE_OF_FEW_GROUPS = 2e-3, 1e-5, 1e-9
# Largest tables of one round of lanes, in entries (lanes x groups x options).
_ROUND_SIZE = 20_000
_ROUNDS = 4
_PILOTS = 5
# The first sweep: few lanes, few groups, few states.
_CORE_LANES, _CORE_GROUPS = 4, 20
_CORE_STATES = 100
# Splits: how often, how many groups of largest cost at a time, into how many lanes; the sweeps before and after.
_SPLITS, _SPLIT_GROUPS = 5, 2
_SPLIT_LANES = (12, 48)
_SPLIT_STATES, _SPLIT_CORE_GROUPS, _SPLIT_CORE_STATES = 200, 24, 200
# Lanes are split again only while the gap is above so many tolerances.
_COARSER = 2.5
# The wide sweeps that follow: most states, and most entries of the tables of all steps (options x states x prices).
_WIDER = ((400, 300_000), (4000, 800_000))
_WIDE_LANES = 12
# The same for one cost: the first sweep, all groups of its lanes, and all groups of all lanes.
_STATES_OF_ONE_COST = 1000
_WIDE_OF_ONE_COST = (2000, 1_000_000)
_WIDEST_OF_ONE_COST = (20_000, 3_000_000)
# A wide sweep with fewer states finds nothing that the others do not.
_LEAST_STATES = 60


@dataclass(eq=False)
class Best:
    """The best choice so far, and the judge of new ones.

    Attributes
    ----------
    judge : callable
        Returns the true value of options, or None if they are not within the limits.
    """

    judge: Callable[[_Ints], float | None]
    value: float = -np.inf
    options: _Ints | None = None

    def offer(self, options: _Ints) -> bool:
        """Take over a choice if it is allowed and better."""
        value = self.judge(options)
        if value is None or value <= self.value:
            return False
        self.value, self.options = value, options.copy()
        return True


def judge_of(choices: Choices, limits: Limits) -> Callable[[_Ints], float | None]:
    """Return a judge of true values within the limits."""

    def judge(options: _Ints) -> float | None:
        totals = choices.totals(options)
        return totals.value if limits.admit(totals) else None

    return judge


def solve(problem: Problem, best: Best, *, tolerance: float | None = None) -> float:
    """Improve the best choice until the bounds are met or the work is done; return the bound.

    Depths are taken in rounds, largest bound first. One cost is solved exactly as long as few states are
    undominated; several are searched to within 0.2 % of the bound, or as far as the work allows.
    """
    goal = _Goal(best, _tolerance(problem) if tolerance is None else tolerance)
    bounds = bounds_of_depths(problem, np.zeros((1, problem.room.shape[1])))[:, 0]
    size = max(1, _ROUND_SIZE // problem.inner_value.size)
    bounds = _after_pilots(problem, bounds, size)
    done = np.zeros(len(bounds), dtype=bool)
    for _ in range(_ROUNDS):
        hopeful = np.flatnonzero(~done & (bounds > goal()))
        if not len(hopeful):
            break
        depths = hopeful[np.argsort(-bounds[hopeful], kind="stable")[:size]]
        done[depths] = True
        lanes = lanes_of(problem, depths)
        impossible = np.setdiff1d(depths, lanes.depth)
        bounds[impossible] = -np.inf
        if not len(lanes):
            continue
        units = unit_prices(lanes, best_prices(lanes))
        table = bounds_of_depths(problem, units)
        bounds = np.minimum(bounds, table.min(axis=1))
        # A lane takes over the prices of another one if they are better.
        priced = price(lanes, units[table[lanes.depth].argmin(axis=1)] * lanes.room)
        bounds[lanes.depth] = np.minimum(bounds[lanes.depth], priced.bound)
        _search(priced, bounds, goal)
    return max(float(bounds.max(initial=-np.inf)), best.value)


@dataclass(frozen=True, eq=False)
class _Goal:
    """The value that a lane must promise to be worth a look."""

    best: Best
    tolerance: float

    def __call__(self, factor: float = 1.0) -> float:
        value = self.best.value
        return value + factor * self.tolerance * abs(value) if np.isfinite(value) else value


def _tolerance(problem: Problem) -> float:
    groups, dims = problem.room.shape
    if groups <= _FEW_GROUPS:
        return _TOLERANCE_OF_FEW_GROUPS
    return _TOLERANCE_OF_ONE_COST if dims == 1 else _TOLERANCE


def _after_pilots(problem: Problem, bounds: _Floats, size: int) -> _Floats:
    """Tighten the bounds of many depths with the best prices of a few."""
    reachable = np.flatnonzero(np.isfinite(bounds))
    if len(reachable) <= size:
        return bounds
    spread = np.linspace(0, len(reachable) - 1, _PILOTS).astype(int)
    lanes = lanes_of(problem, reachable[np.unique(spread)])
    if not len(lanes):
        return bounds
    prices = unit_prices(lanes, best_prices(lanes))
    tighter: _Floats = bounds_of_depths(problem, prices).min(axis=1)
    return np.minimum(bounds, tighter)


def _search(priced: Priced, bounds: _Floats, goal: _Goal) -> None:
    """Look through the lanes, wider and wider; lower the bounds of those that are exhausted."""
    for options in rounded(priced):
        goal.best.offer(options)
    groups = len(bounds)
    if priced.lanes.cost.shape[-1] == 1:
        _look(priced, bounds, goal, _CORE_LANES, _CORE_GROUPS, _STATES_OF_ONE_COST)
        _look(priced, bounds, goal, _CORE_LANES, groups, *_WIDE_OF_ONE_COST)
        _look(priced, bounds, goal, groups, groups, *_WIDEST_OF_ONE_COST)
        return
    _look(priced, bounds, goal, _CORE_LANES, _CORE_GROUPS, _CORE_STATES)
    _split(_promising(priced, bounds, goal, _WIDE_LANES), goal)
    for states, work in _WIDER:
        _look(priced, bounds, goal, _WIDE_LANES, groups, states, work)


def _promising(priced: Priced, bounds: _Floats, goal: _Goal, most: int) -> Priced:
    """Return the lanes that may still reach the goal, largest bound first."""
    bound = bounds[priced.lanes.depth]
    order = np.argsort(-bound, kind="stable")[:most]
    return priced.at(order[bound[order] > goal()])


def _look(
    priced: Priced,
    bounds: _Floats,
    goal: _Goal,
    lanes: int,
    groups: int,
    states: int,
    work: float = np.inf,
) -> None:
    """Sweep through some lanes with so many open groups and states."""
    part = _promising(priced, bounds, goal, lanes)
    if not len(part.lanes):
        return
    hopeful = part.hopeful(goal())
    keep = part.core(hopeful, groups)
    cap = int(min(states, work / max(part.work(keep), 1.0)))
    if cap < _LEAST_STATES:
        return
    found = sweep(part, keep, goal(), cap)
    for options in found.options:
        goal.best.offer(options)
    whole = (keep == hopeful).all(axis=(1, 2))
    # What was pruned could not reach the goal, which has only risen since.
    left = np.where(whole, np.maximum(goal(), found.dropped), np.inf)
    depth = part.lanes.depth
    bounds[depth] = np.minimum(bounds[depth], left)


def _split(part: Priced, goal: _Goal) -> None:
    """Fix the groups of largest cost in the ways of largest bound, price each way anew, and go on from there.

    A few groups hold most bytes of a real net. What is left of the room differs so much with their options that
    one set of prices cannot judge the rest.
    """
    for split in range(_SPLITS):
        part = part.at(np.flatnonzero(part.bound > goal(_COARSER if split else 1.0)))
        if not len(part.lanes):
            return
        ways = int(np.clip(_ROUND_SIZE // max(part.lanes.value[:1].size, 1), *_SPLIT_LANES))
        found = sweep(
            part,
            part.hopeful(goal()),
            goal(),
            _SPLIT_STATES,
            answers=ways,
            most_groups=_SPLIT_GROUPS,
        )
        lanes = fixed(part.lanes, found.lane, found.options)
        if not len(lanes):
            return
        part = price(lanes, best_prices(lanes))
        for options in rounded(part):
            goal.best.offer(options)
        keep = part.core(part.hopeful(goal()), _SPLIT_CORE_GROUPS)
        for options in sweep(part, keep, goal(), _SPLIT_CORE_STATES).options:
            goal.best.offer(options)
