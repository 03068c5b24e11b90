"""The joint solver: which groups to train, and how, within seconds, memory and uplink at once.

Once the depth is fixed this is a multiple-choice knapsack with up to three costs (Kellerer, Pferschy and Pisinger,
Knapsack Problems, chapters 9 and 11). Prices on the costs bound every depth; a search guided by these bounds visits
only the depths, groups and options that can still beat the best known answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.choices import Choices, Limits, Totals
from fl_elastic.planning.joint.damage import improve_with_damage, without_damage
from fl_elastic.planning.joint.feasible import find_feasible
from fl_elastic.planning.joint.lanes import problem_of
from fl_elastic.planning.joint.solve import Best, judge_of, solve

__all__ = ["Choices", "JointSelection", "Limits", "Totals", "joint_knapsack"]


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
