"""The joint solver: which groups to train, and how, within seconds, memory and uplink at once.

Once the depth is fixed this is a multiple-choice knapsack with up to three costs (Kellerer, Pferschy and Pisinger,
Knapsack Problems, chapters 9 and 11). Prices on the costs bound every depth; one search for all depths keeps what
can still beat the best known answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import BudgetError
from fl_elastic.planning.joint.choices import COSTS, Choices, Limits, Totals
from fl_elastic.planning.joint.problem import problem_of
from fl_elastic.planning.joint.solve import Best, priced, solve, sweep

__all__ = ["JointSelection", "joint_knapsack"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.intp]
_REPRICINGS, _STATES = 4, 1000
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
    best, harmless = Best(choices, limits), choices
    best.offer_nothing()
    if choices.damaging.any():
        available = choices.available & ~choices.damaging
        harmless = replace(choices, available=available, damage=np.zeros_like(choices.damage))
    problem = problem_of(harmless, limits)
    bound = solve(problem, best)
    if best.options is None:
        best.offer(_feasible(choices, limits))
        bound = max(bound, solve(problem, best))
    if harmless is not choices:
        _improve_with_damage(choices, limits, best)
        bound = math.nan
    assert best.options is not None
    return JointSelection(best.options, choices.totals(best.options), bound)


def _improve_with_damage(choices: Choices, limits: Limits, best: Best) -> None:
    """Offer choices with damaging options: one change after another, then a sweep that counts the damage."""
    assert best.options is not None
    for _ in range(_REPRICINGS):
        kept, deeper = _kept_and_deeper(choices, best.options)
        value = kept[:, None] * (choices.value - choices.damage * deeper[:, None])
        linear = replace(choices, value=value, damage=np.zeros_like(choices.damage))
        found = Best(linear, limits)
        solve(problem_of(linear, limits), found)
        if found.options is None or not best.offer(found.options):
            break
    problem = problem_of(choices, limits)
    prices, promise = priced(problem, best)
    kept, _ = _kept_and_deeper(choices, best.options)
    problem = replace(problem, damage=choices.damage, kept=kept)
    for options in sweep(problem, prices[:2][-1:], promise, _STATES, -np.inf)[0]:
        best.offer(options)


def _kept_and_deeper(choices: Choices, options: _Ints) -> tuple[_Floats, _Floats]:
    """Return the share of each group's value that is kept, and the value below each group."""
    own = (np.arange(len(options)), options)
    share, value, deeper = 1.0 - choices.damage[own], choices.value[own], np.zeros(len(options))
    for group in range(len(options) - 1, 0, -1):
        deeper[group - 1] = value[group] + share[group] * deeper[group]
    return np.concatenate([[1.0], np.cumprod(share)[:-1]]), deeper


def _feasible(choices: Choices, limits: Limits) -> _Ints:
    """Return options within the limits, found as the least of one cost within the other limits.

    Raises
    ------
    BudgetError
        If there are none; the message names the least limits that would do.
    """
    bounded = [name for name in COSTS if limits.with_slack(name) < np.inf] or [COSTS[0]]

    def missing(name: str, options: _Ints, within: str = "") -> str:
        least, limit = getattr(choices.totals(options), name), getattr(limits, name)
        fits = least <= limits.with_slack(name)
        return "" if fits else f"{name} must be at least {least:.6g} (limit {limit:g}){within}"

    short = []
    for name in bounded:
        alone = _least(choices, Limits(), name)
        if alone is None:
            raise BudgetError(
                f"forced groups {list(choices.forced)} have no available option of finite cost; "
                "make one available or do not force them"
            )
        short.append(missing(name, alone))
    # Each cost alone could be met: relax one after the other until the rest can be met together.
    rest = limits
    for place, name in enumerate(bounded if not any(short) else []):
        rest = replace(rest, **{name: np.inf})
        options = _least(choices, rest, name)
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


def _least(choices: Choices, limits: Limits, name: str) -> _Ints | None:
    """Return the options that cost least of one kind within the limits."""
    best = Best(choices, limits, name)
    best.offer_nothing()
    solve(problem_of(choices, limits, least=name), best, tolerance=_TOLERANCE)
    return best.options
