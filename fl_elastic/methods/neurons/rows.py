"""Which groups of a model have neurons to choose from, and the modes that train some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic.planning.channel_modes import has_operations
from fl_elastic.profiling import CostProfile

__all__ = ["NeuronLayer", "modes_of", "neuron_layers", "neuron_mode"]

Chosen = NDArray[np.bool_]
# By autograd's names of them: a layer norm has entries for features, and no neuron's own outputs.
_NORMS = ("BatchNorm", "GroupNorm")


@dataclass(frozen=True)
class NeuronLayer:
    """A group whose neurons can be trained one by one.

    Attributes
    ----------
    name : str
        Of the group, and of its module.
    neurons : int
        How many there are.
    parameters : int
        Weights of each, its bias among them: of a depthwise channel those of its own kernel alone.
    is_norm : bool
        Whether these are entries of a norm.
    """

    name: str
    neurons: int
    parameters: int
    is_norm: bool


def neuron_layers(profile: CostProfile) -> dict[int, NeuronLayer]:
    """Return the layers with neurons by group index: all that can be trained by rows, besides the head."""
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
    """Return the length of the first axis of all parameters; 0 if they differ."""
    lengths = {shape[0] if shape else 0 for shape in group.shapes}
    return lengths.pop() if len(lengths) == 1 else 0


def neuron_mode(chosen: Chosen) -> Mode:
    """Return how a group trains of which these neurons are chosen.

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
    """Return the modes of all groups: by neurons where some are chosen of, ``others`` elsewhere.

    Parameters
    ----------
    groups : int
        How many there are.
    chosen : mapping of int to array
        Neurons that train, by group index.
    reachable : int, optional
        Groups, from the loss, that may train at all.
    others : Mode
        Of groups without an entry.
    """
    modes = [neuron_mode(chosen[g]) if g in chosen else others for g in range(groups)]
    end = groups if reachable is None else reachable
    return [*modes[:end], *[Mode.FROZEN] * (groups - end)]
