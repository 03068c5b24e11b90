"""Groups of a model with neurons to choose from, and the modes that train the neurons that fit the budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic.methods.neurons.motion import Values
from fl_elastic.planning.channel_modes import has_operations
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling import CostProfile

Chosen = NDArray[np.bool_]
# Autograd's names of norms with neurons; a layer norm's entries belong to features.
_NORMS = ("BatchNorm", "GroupNorm")


@dataclass(frozen=True)
class NeuronLayer:
    """A group whose neurons can be trained one by one.

    Attributes
    ----------
    name : str
        Name of the group, and of its module.
    neurons : int
        Number of neurons.
    parameters : int
        Number of weights per neuron, including its bias; for a depthwise channel those of its own kernel.
    is_norm : bool
        Whether the neurons are entries of a norm.
    """

    name: str
    neurons: int
    parameters: int
    is_norm: bool


def neuron_layers(profile: CostProfile) -> dict[int, NeuronLayer]:
    """Return the layers with neurons by group index: all that can be trained by rows, except the head."""
    graph = profile.graph
    found = {}
    for index, group in enumerate(graph.groups):
        node = graph.nodes[graph.group_nodes()[index][0]].name
        is_norm = group.kind is GroupKind.NORM and any(each in node for each in _NORMS)
        once = graph.group_layers[index] == (group.name,)
        if index != graph.head and once and (is_norm or has_operations(profile, index)):
            neurons = _neurons(group)
            if neurons:
                found[index] = NeuronLayer(group.name, neurons, group.numel // neurons, is_norm)
    return found


def _neurons(group: TensorGroup) -> int:
    """Return the length of the first axis of all parameters; 0 if the lengths differ."""
    lengths = {shape[0] if shape else 0 for shape in group.shapes}
    return lengths.pop() if len(lengths) == 1 else 0


def neuron_mode(chosen: Chosen) -> Mode:
    """Return the mode of a group in which these neurons are chosen.

    >>> [str(neuron_mode(np.arange(4) < count)) for count in (0, 1, 4)]
    ['frozen', 'neuron/4', 'full']
    """
    count = int(np.count_nonzero(chosen))
    if count in (0, len(chosen)):
        return Mode.FULL if count else Mode.FROZEN
    return Mode.channels(count / len(chosen), "neuron")


def modes_of(
    groups: int, chosen: Mapping[int, Chosen], reachable: int | None, *, others: Mode = Mode.FULL
) -> list[Mode]:
    """Return the modes of all groups: that of its neurons for each group in ``chosen``, ``others`` for the rest.

    Parameters
    ----------
    groups : int
        Number of groups.
    chosen : mapping of int to array
        Masks of the neurons that train, by group index.
    reachable : int, optional
        Number of groups, from the loss on, that may train.
    others : Mode
        Mode of groups without an entry.
    """
    modes = [neuron_mode(chosen[g]) if g in chosen else others for g in range(groups)]
    end = groups if reachable is None else reachable
    return [*modes[:end], *[Mode.FROZEN] * (groups - end)]


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
        Has the allowed step time, and the measured costs.
    scores : mapping of int to array
        Score of each neuron, by group index.
    threshold : float
        Lowest threshold to try.
    modes_for : callable
        Returns the modes of all groups for a choice of neurons.

    Returns
    -------
    dict of int to array
        Masks by group index; no neuron is chosen if not even a single one fits.
    """
    everything = np.concatenate([*scores.values(), np.zeros(0)])
    levels = [threshold, *np.unique(everything[everything > threshold]).tolist()]

    def fits(level: float) -> bool:
        return request.fits_modes(modes_for(above(scores, level)))

    place = bisect_left(levels, True, hi=len(levels) - 1, key=fits)
    return above(scores, levels[place])
