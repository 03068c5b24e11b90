"""The multiple-choice solver: which groups to train, and how, within joint limits of seconds, memory and uplink.

For a fixed depth this is a multiple-choice knapsack with up to three costs (Kellerer, Pferschy and Pisinger,
Knapsack Problems, chapters 9 and 11). Prices on the costs give a bound for every depth. One search for all depths
decides the options group by group, from the deepest one towards the loss. A state is a partial decision: its value
so far and the room that it leaves. The prices give a bound on its final value. States that no longer fit, or cannot
beat the best known answer, are dropped. If too many states are left, only those with the best bounds are kept;
otherwise the search is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import BudgetError
from fl_elastic.planning.multiple_choice.choices import COSTS, ChoiceLimits, Choices, Totals
from fl_elastic.planning.multiple_choice.problem import (
    Problem,
    best_prices,
    bounds_above,
    bounds_of_depths,
    lane,
    problem_of,
)

_Floats = NDArray[np.float64]
_Ints = NDArray[np.intp]

# Up to this many groups the search does not end at an approximate answer.
_FEW_GROUPS = 16
_TOLERANCE, _TOLERANCE_OF_ONE_COST, _TOLERANCE_OF_FEW_GROUPS = 2e-3, 1e-5, 1e-9
_TOLERANCE_OF_THE_LEAST = 1e-6
# Number of states that each successive sweep keeps, until the bound is met.
_STATES, _STATES_OF_ONE_COST = (100, 1000), (300, 3000, 20_000)
_ANSWERS = 8
# Room that is negative only by rounding still counts as enough.
_ROUNDING = 1e-12
# Factors by which prices are raised until the room suffices; and by which they are varied to judge states.
_RAISES = (1.0, 1.01, 1.02, 1.04, 1.08, 1.15, 1.3, 1.6, 2.5, 5.0)
_SPREAD = 1.6
_PRICED = 8


@dataclass(frozen=True, eq=False)
class MultipleChoiceSelection:
    """The options chosen by the multiple-choice solver.

    Attributes
    ----------
    options : array of int, shape (N,)
        Option of every group in backward order; 0 is frozen.
    totals : Totals
        Worth and costs of these options.
    bound : float
        Upper bound on the worth of any selection within the limits.
    """

    options: NDArray[np.intp]
    totals: Totals
    bound: float


def multiple_choice_knapsack(choices: Choices, limits: ChoiceLimits) -> MultipleChoiceSelection:
    """Return the options of largest total value within all limits.

    With one limit and up to 16 groups the answer is exact, as long as few states are undominated. With more groups
    the search ends within 1e-5 of the bound, with several limits within 0.2 %, or after a fixed amount of work.

    Parameters
    ----------
    choices : Choices
        N groups in backward order with K options each.
    limits : ChoiceLimits
        In the units of the costs; infinite for no limit.

    Raises
    ------
    BudgetError
        If the forced groups cannot fit; the message names the nearest limits that would suffice.

    Examples
    --------
    >>> value = np.array([[0.0, 3.0, 2.0], [0.0, 5.0, 4.0]])
    >>> size = np.array([[0.0, 4.0, 1.0], [0.0, 4.0, 2.0]])
    >>> choices = Choices(value, size, size, size, value > 0, np.zeros(2), np.zeros(2))
    >>> multiple_choice_knapsack(choices, ChoiceLimits(seconds=9.0, uplink=5.0)).options.tolist()
    [2, 1]
    """
    if not len(choices.value):
        return MultipleChoiceSelection(np.zeros(0, dtype=np.intp), choices.totals([]), 0.0)
    options, bound = _solved(choices, limits)
    if options is None:
        options, bound = _solved(choices, limits, _feasible(choices, limits))
    assert options is not None
    return MultipleChoiceSelection(options, choices.totals(options), bound)


def _feasible(choices: Choices, limits: ChoiceLimits) -> _Ints:
    """Return options within the limits, found by minimising one cost within the other limits.

    Raises
    ------
    BudgetError
        If there are none; the message names the least limits that would suffice.
    """
    bounded = [name for name in COSTS if limits.with_slack(name) < np.inf] or [COSTS[0]]

    def missing(name: str, options: _Ints, within: str = "") -> str:
        least, limit = getattr(choices.totals(options), name), getattr(limits, name)
        fits = least <= limits.with_slack(name)
        return "" if fits else f"{name} must be at least {least:.6g} (limit {limit:g}){within}"

    short = []
    for name in bounded:
        alone = _solved(choices, ChoiceLimits(), least=name)[0]
        if alone is None:
            raise BudgetError(
                f"forced groups {list(choices.forced)} have no available option of finite cost; "
                "make one available or do not force them"
            )
        short.append(missing(name, alone))
    # Each limit alone can be met: drop one limit after another until the rest can be met together.
    rest = limits
    for place, name in enumerate(bounded if not any(short) else []):
        rest = replace(rest, **{name: np.inf})
        options = _solved(choices, rest, least=name)[0]
        if options is None:
            continue
        others = [f"{each} within {getattr(limits, each):g}" for each in bounded[place + 1 :]]
        short = [missing(name, options, f", with {' and '.join(others)}" if others else "")]
        if place == 0 and not short[0]:
            return options
        break
    what = f"forced groups {list(choices.forced)} do not fit" if choices.forced else "nothing fits"
    why = "; ".join(filter(None, short)) or f"{' and '.join(bounded)} cannot be met together"
    raise BudgetError(f"{what}: {why}")


@dataclass(eq=False)
class _Best:
    """The best selection so far within the limits: by value, or by least cost if ``least`` names a cost."""

    choices: Choices
    limits: ChoiceLimits
    least: str | None = None
    options: _Ints | None = None
    value: float = -np.inf

    def offer(self, options: _Ints | None) -> bool:
        """Keep a selection if it is within the limits and better; groups that it does not cover are frozen."""
        if options is None:
            return False
        chosen = np.zeros(len(self.choices.value), dtype=np.intp)
        chosen[: len(options)] = options
        totals = self.choices.totals(chosen)
        value = totals.value if self.least is None else -float(getattr(totals, self.least))
        if not self.limits.admit(totals) or value <= self.value:
            return False
        self.value, self.options = value, chosen
        return True


def _solved(
    choices: Choices, limits: ChoiceLimits, known: _Ints | None = None, *, least: str | None = None
) -> tuple[_Ints | None, float]:
    """Return the options of largest value, or of least cost ``least``, and the bound; try ``known`` ones first."""
    best, problem = _Best(choices, limits, least), problem_of(choices, limits, least=least)
    nothing = None if choices.forced else np.zeros(0, dtype=np.intp)
    for options in (nothing, known):
        best.offer(options)
    one = len(problem.room) == 1
    tolerance = _TOLERANCE_OF_ONE_COST if one else _TOLERANCE
    if least is not None:
        tolerance = _TOLERANCE_OF_THE_LEAST
    elif len(problem.allowed[0]) <= _FEW_GROUPS:
        tolerance = _TOLERANCE_OF_FEW_GROUPS
    prices, promise = _priced(problem, best)
    bound = float(promise.max(initial=-np.inf))
    for states in _STATES_OF_ONE_COST if one else _STATES:
        goal = best.value
        if np.isfinite(goal):
            goal += tolerance * abs(goal)
        if not bound > goal:
            break
        answers, dropped = _swept(problem, prices, promise, states, goal)
        for options in answers:
            best.offer(options)
        # No pruned state can exceed the goal.
        bound = min(bound, max(goal, dropped))
        if dropped <= goal:
            break
    return best.options, max(bound, best.value)


def _priced(problem: Problem, best: _Best) -> tuple[_Floats, _Floats]:
    """Return prices (P, D) for the most promising depths, and each depth's bound; offer rounded answers."""
    prices = np.zeros((1, len(problem.room)))
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
        promise[depth] = min(promise[depth], own)
        most = found if most is None or promise[depth] >= promise.max() else most
        best.offer(_rounded(*known, found))
    return (prices if most is None else np.concatenate([prices, _moved(most)])), promise


def _moved(prices: _Floats) -> _Floats:
    """Return variants of the prices, each with one price moved up or down, shape (2 D, D)."""
    own = np.eye(len(prices), dtype=bool)
    factors = [np.where(own, by, 1.0) for by in (_SPREAD, 1 / _SPREAD)]
    return np.asarray(prices * np.concatenate(factors))


def _rounded(value: _Floats, cost: _Floats, room: _Floats, prices: _Floats) -> _Ints | None:
    """Return the best options at prices raised just enough for the room; None if no factor suffices."""
    groups, charge = np.arange(len(value)), cost @ prices
    for factor in _RAISES:
        options: _Ints = (value - factor * charge).argmax(axis=1)
        if (cost[groups, options].sum(axis=0) <= room + _ROUNDING).all():
            return options
    return None


def _swept(
    problem: Problem, prices: _Floats, promise: _Floats, states: int, goal: float
) -> tuple[list[_Ints], float]:
    """Process all groups once, from the deepest towards the loss.

    A state's bound is the least one over all prices. After each group at most ``states`` states are kept, all of
    them with a bound above the goal. Returns the best selections, and the best bound among the states that were
    dropped because of the cap.
    """
    begins = promise > goal
    groups, dims = len(problem.allowed[0]), len(problem.room)
    above, needed = bounds_above(problem, prices), problem.needed
    value, room, dropped = np.zeros(0), np.zeros((0, dims)), -np.inf
    history: list[tuple[int, _Ints, _Ints]] = []
    for group in range(int(np.flatnonzero(begins).max(initial=-1)), -1, -1):
        inner = np.flatnonzero(problem.allowed[0, group])
        last = np.flatnonzero(problem.allowed[1, group] & begins[group])
        going_on = problem.value[0, group, inner] + value[:, None]
        values = np.concatenate([going_on.ravel(), problem.value[1, group, last]])
        left = (room[:, None] - problem.cost[0, group, inner]).reshape(-1, dims)
        rooms = np.concatenate([left, problem.room - problem.cost[1, group, last]])
        parent = np.concatenate(
            [np.repeat(np.arange(len(value)), len(inner)), np.full(len(last), -1)]
        )
        option = np.concatenate([np.tile(inner, len(value)), last])
        reach = values + (rooms @ prices.T + above[group]).min(axis=1)
        fits = (rooms >= needed[group] - _ROUNDING).all(axis=-1) & (reach > goal)
        chosen = np.flatnonzero(fits)
        if dims == 1:
            # A state is dominated if another one has at least its value and more room.
            chosen = chosen[np.lexsort((-values[chosen], -rooms[chosen, 0]))]
            best = np.maximum.accumulate(values[chosen])
            chosen = chosen[np.diff(best, prepend=-np.inf) > 0]
        if len(chosen) > states:
            chosen = chosen[np.argsort(-reach[chosen], kind="stable")]
            dropped, chosen = max(dropped, float(reach[chosen[states]])), chosen[:states]
        value, room = values[chosen], rooms[chosen]
        history.append((group, parent[chosen], option[chosen]))
    answers = np.argsort(-value, kind="stable")[:_ANSWERS].tolist()
    return [_traced(history, state, groups) for state in answers], dropped


def _traced(history: list[tuple[int, _Ints, _Ints]], state: int, groups: int) -> _Ints:
    options = np.zeros(groups, dtype=np.intp)
    for group, parent, option in reversed(history):
        options[group] = option[state]
        state = int(parent[state])
        if state < 0:
            break
    return options
