"""A feasible start where limits are tight, or the reason why there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import BudgetError
from fl_elastic.planning.joint.choices import COSTS, Choices, Limits
from fl_elastic.planning.joint.lanes import problem_of
from fl_elastic.planning.joint.solve import Best, solve

__all__ = ["find_feasible"]

_Ints = NDArray[np.intp]

_TOLERANCE = 1e-6


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
