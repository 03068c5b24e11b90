"""The joint solver: which groups to train, and how, within seconds, memory and uplink at once.

Once the depth is fixed this is a multiple-choice knapsack with up to three costs (Kellerer, Pferschy and Pisinger,
Knapsack Problems, chapters 9 and 11). Prices on the costs bound every depth; a search guided by these bounds visits
only the depths, groups and options that can still beat the best known answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import BudgetError
from fl_elastic.planning.joint.choices import COSTS, Choices, Limits, Totals
from fl_elastic.planning.joint.lanes import Problem, lanes_of, problem_of
from fl_elastic.planning.joint.prices import best_prices, unit_prices
from fl_elastic.planning.joint.solve import Best, judge_of, solve

__all__ = [
    "Choices",
    "JointSelection",
    "Limits",
    "Totals",
    "find_feasible",
    "improve_with_damage",
    "joint_knapsack",
    "without_damage",
]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.intp]
_REPRICINGS = 4
# Entries of all tables of one sweep; it decides how many states are kept.
_WORK = 400_000
_LEAST_STATES, _MOST_STATES = 50, 4000
_ANSWERS = 8
# Room below zero by rounding alone still counts as room.
_ROUNDING = 1e-12
_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class JointSelection:
    """The options chosen by the joint solver.

    Attributes
    ----------
    options : array of int, shape (N,)
        Option of every group in backward order; 0 is frozen.
    totals : Totals
        What they are worth and cost.
    bound : float
        No selection within the limits is worth more; NaN if an available option does damage.
    """

    options: NDArray[np.intp]
    totals: Totals
    bound: float


def joint_knapsack(choices: Choices, limits: Limits) -> JointSelection:
    """Return the options of largest total value within all limits.

    With one limit the answer is exact up to 16 groups, as long as few states are undominated; beyond, it is
    searched to within 1e-5 of the bound, and with several limits to within 0.2 %, or as far as a fixed amount of
    work allows. With damage the answer is a good one, never worse than the best found without damaging options.

    Parameters
    ----------
    choices : Choices
        N groups in backward order with K options each.
    limits : Limits
        In the units of the costs; infinite where there is none.

    Raises
    ------
    BudgetError
        If the forced groups do not fit in any way; the message names the nearest limits that would do.

    Examples
    --------
    >>> value = np.array([[0.0, 3.0, 2.0], [0.0, 5.0, 4.0]])
    >>> size = np.array([[0.0, 4.0, 1.0], [0.0, 4.0, 2.0]])
    >>> choices = Choices(value, size, size, size, value > 0, np.zeros(2), np.zeros(2))
    >>> joint_knapsack(choices, Limits(seconds=9.0, uplink=5.0)).options.tolist()
    [2, 1]
    """
    if not len(choices.value):
        return JointSelection(np.zeros(0, dtype=np.intp), choices.totals([]), 0.0)
    best = Best(judge_of(choices, limits))
    if not choices.forced:
        best.offer(np.zeros(len(choices.value), dtype=np.intp))
    damaging = bool(choices.damaging.any())
    bound = solve(problem_of(without_damage(choices), limits), best)
    if best.options is None:
        best.offer(find_feasible(choices, limits))
        bound = max(bound, solve(problem_of(without_damage(choices), limits), best))
    if damaging:
        improve_with_damage(choices, limits, best)
        bound = math.nan
    assert best.options is not None
    return JointSelection(best.options, choices.totals(best.options), bound)


def without_damage(choices: Choices) -> Choices:
    """Return the choices without their damaging options."""
    if not choices.damaging.any():
        return choices
    harmless = choices.available & ~choices.damaging
    return replace(choices, available=harmless, damage=np.zeros_like(choices.damage))


def improve_with_damage(choices: Choices, limits: Limits, best: Best) -> None:
    """Offer choices with damaging options, starting from the best that is known."""
    problem = problem_of(choices, limits)
    for _ in range(_REPRICINGS):
        linear = _around(choices, best.options)
        found = Best(judge_of(linear, limits))
        solve(problem_of(linear, limits), found)
        if found.options is None or not best.offer(found.options):
            break
    for options in _sweep(choices, problem, best.options):
        best.offer(options)


def _keep_and_deeper(choices: Choices, options: _Ints) -> tuple[_Floats, _Floats]:
    """Return the share of each group's value that is kept, and the value below each group."""
    groups = np.arange(len(options))
    share = 1.0 - choices.damage[groups, options]
    keep = np.concatenate([[1.0], np.cumprod(share)[:-1]])
    deeper = np.zeros(len(options) + 1)
    for group in range(len(options) - 1, 0, -1):
        own = choices.value[group, options[group]]
        deeper[group - 1] = own + share[group] * deeper[group]
    return keep, deeper[:-1]


def _around(choices: Choices, options: _Ints | None) -> Choices:
    """Return choices whose values are what one changed option adds to the given ones."""
    if options is None:
        return replace(choices, damage=np.zeros_like(choices.damage))
    keep, deeper = _keep_and_deeper(choices, options)
    value = keep[:, None] * (choices.value - choices.damage * deeper[:, None])
    return replace(choices, value=value, damage=np.zeros_like(choices.damage))


def _sweep(choices: Choices, problem: Problem, known: _Ints | None) -> list[_Ints]:
    """Decide options from the deepest group towards the loss; return the best complete choices."""
    groups, options, _ = problem.inner_cost.shape
    cap = int(np.clip(_WORK / (groups * options), _LEAST_STATES, _MOST_STATES))
    prices, keep = np.zeros(problem.room.shape[1]), np.ones(groups)
    reachable = problem.reachable
    if known is not None and known.any():
        keep, _ = _keep_and_deeper(choices, known)
        lanes = lanes_of(problem, np.flatnonzero(known)[-1:])
        if len(lanes):
            prices = unit_prices(lanes, best_prices(lanes))[0]
    cheapest = np.where(problem.inner_allowed[..., None], problem.inner_cost, np.inf).min(axis=1)
    needed = np.concatenate([np.zeros((1, len(prices))), np.cumsum(cheapest, axis=0)])
    value, room = np.zeros(0), np.zeros((0, len(prices)))
    history: list[tuple[int, _Ints, _Ints]] = []
    for group in range(int(np.flatnonzero(reachable).max(initial=-1)), -1, -1):
        inner = np.flatnonzero(problem.inner_allowed[group])
        share = 1.0 - choices.damage[group, inner]
        values = problem.inner_value[group, inner] + share * value[:, None]
        rooms = room[:, None] - problem.inner_cost[group, inner]
        parent = np.repeat(np.arange(len(value)), len(inner))
        option = np.tile(inner, len(value))
        values, rooms = values.ravel(), rooms.reshape(-1, len(prices))
        if reachable[group]:
            last = np.flatnonzero(problem.last_allowed[group])
            values = np.concatenate([values, problem.last_value[group, last]])
            rooms = np.concatenate([rooms, problem.room[group] - problem.last_cost[group, last]])
            parent = np.concatenate([parent, np.full(len(last), -1)])
            option = np.concatenate([option, last])
        fits = np.flatnonzero((rooms >= needed[group] - _ROUNDING).all(axis=-1))
        merit = keep[group] * values[fits] + rooms[fits] @ prices
        chosen = fits[np.argsort(-merit, kind="stable")[:cap]]
        value, room = values[chosen], rooms[chosen]
        history.append((group, parent[chosen], option[chosen]))
    best = np.argsort(-value, kind="stable")[:_ANSWERS].tolist()
    return [_trace(history, state, groups) for state in best]


def _trace(history: list[tuple[int, _Ints, _Ints]], state: int, groups: int) -> _Ints:
    options = np.zeros(groups, dtype=np.intp)
    for group, parent, option in reversed(history):
        options[group] = option[state]
        state = int(parent[state])
        if state < 0:
            break
    return options


def find_feasible(choices: Choices, limits: Limits) -> _Ints:
    """Return options within the limits, found as the least of one cost within the other limits.

    Raises
    ------
    BudgetError
        If there are none; the message names the least limits that would do.
    """
    bounded = [name for name in COSTS if limits.with_slack(name) < np.inf] or [COSTS[0]]
    short = []
    for name in bounded:
        options = _least(choices, Limits(), name)
        if options is None:
            raise BudgetError(
                f"forced groups {list(choices.forced)} have no available option of finite cost; "
                "make one available or do not force them"
            )
        least = getattr(choices.totals(options), name)
        if least > limits.with_slack(name):
            short.append(_needs(name, least, limits))
    if short:
        raise BudgetError(_message(choices, short))
    # Each cost alone could be met: relax one after the other until the rest can be met together.
    for place, name in enumerate(bounded):
        rest = replace(limits, **{other: np.inf for other in bounded[: place + 1]})
        options = _least(choices, rest, name)
        if options is None:
            continue
        least = getattr(choices.totals(options), name)
        if place == 0 and least <= limits.with_slack(name):
            return options
        if least > limits.with_slack(name):
            within = [
                f"{other} within {getattr(limits, other):g}" for other in bounded[place + 1 :]
            ]
            raise BudgetError(_message(choices, [_needs(name, least, limits)], within))
    raise BudgetError(_message(choices, [f"{' and '.join(bounded)} cannot be met together"]))


def _least(choices: Choices, limits: Limits, name: str) -> _Ints | None:
    """Return the options that cost least of one kind within the limits."""

    def judge(options: _Ints) -> float | None:
        totals = choices.totals(options)
        return -float(getattr(totals, name)) if limits.admit(totals) else None

    best = Best(judge)
    if not choices.forced:
        best.offer(np.zeros(len(choices.value), dtype=np.intp))
    solve(problem_of(choices, limits, least=name), best, tolerance=_TOLERANCE)
    return best.options


def _needs(name: str, least: float, limits: Limits) -> str:
    return f"{name} must be at least {least:.6g} (limit {getattr(limits, name):g})"


def _message(choices: Choices, needs: list[str], within: list[str] | None = None) -> str:
    what = f"forced groups {list(choices.forced)} do not fit" if choices.forced else "nothing fits"
    given = f", with {' and '.join(within)}" if within else ""
    return f"{what}: {'; '.join(needs)}{given}"
