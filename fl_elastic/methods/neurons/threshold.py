"""Raise the threshold for choosing neurons until the step that trains them fits the budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fl_elastic.groups import Mode
from fl_elastic.methods.neurons.motion import Values
from fl_elastic.methods.neurons.rows import Chosen
from fl_elastic.planning.request import PlanRequest


def above(scores: Mapping[int, Values], threshold: float) -> dict[int, Chosen]:
    """Return the neurons whose score is above a threshold, by group index."""
    return {group: score > threshold for group, score in scores.items()}


def fitting(
    request: PlanRequest,
    scores: Mapping[int, Values],
    threshold: float,
    modes_for: Callable[[Mapping[int, Chosen]], Sequence[Mode]],
) -> dict[int, Chosen]:
    """Return the neurons above the lowest threshold, from the given one up, whose step fits the budget.

    Parameters
    ----------
    request : PlanRequest
        Says how long a step may take, and how long it takes by the measured costs.
    scores : mapping of int to array
        Score of each neuron, by group index.
    threshold : float
        Lowest threshold to try.
    modes_for : callable
        Returns the modes of all groups for a choice of neurons.

    Returns
    -------
    dict of int to array
        Nothing is chosen if even that does not fit.
    """
    everything = np.concatenate([*scores.values(), np.zeros(0)])
    levels = [threshold, *np.unique(everything[everything > threshold]).tolist()]

    def fits(level: float) -> bool:
        return request.fits_modes(modes_for(above(scores, level)))

    place = bisect_left(levels, True, hi=len(levels) - 1, key=fits)
    return above(scores, levels[place])
