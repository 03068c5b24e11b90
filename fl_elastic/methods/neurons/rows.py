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

Chosen = NDArray[np.bool_]
# Autograd's names of norms with neurons; a layer norm's entries belong to features, not to neurons.
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
    """Return the modes of all groups: by neurons for groups in ``chosen``, ``others`` for the rest.

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
