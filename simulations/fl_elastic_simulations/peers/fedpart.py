"""All clients train the same one layer, which moves from the input to the output."""

from __future__ import annotations

import numpy as np

from fl_elastic.groups.graph import BackwardGraph, GroupKind
from fl_elastic_simulations.peers.base import LocalResult, LocalTask, Peer, register_peer
from fl_elastic_simulations.peers.masked import mask_of, train_mask

__all__ = ["FedPart", "layer_in_turn", "layers_of"]

_FULL_ROUNDS = 5
_ROUNDS_PER_LAYER = 2


@register_peer("fedpart")
class FedPart(Peer):
    """Train one layer per round, the same at every client, shallow to deep and round again.

    FedPart (Wang et al., NeurIPS 2024, "Why Go Full?"). From the paper: one layer per round, so that averaging does
    not set layers of different clients against each other; sequential from the input; many cycles. From its
    published settings: five rounds of the whole network first, two rounds per layer, no full rounds between cycles,
    FedAvg's weights. Assumed: a layer is a convolution or linear layer with the norm behind it; frozen norms
    run in eval mode. The paper knows no deadline: where a round does not fit, it takes fewer steps.
    """

    rule = "contributors"
    weighting = "examples"

    def local_training(self, task: LocalTask) -> LocalResult:
        """Train the layer whose turn it is."""
        groups = layer_in_turn(task.profile.graph, task.server_round)
        mask = mask_of(task.profile, groups)
        return train_mask(task, self.name, mask if groups else np.ones_like(mask))


def layer_in_turn(graph: BackwardGraph, server_round: int) -> tuple[int, ...]:
    """Return the groups of the layer that is trained in a round, counted from 1; none stands for all.

    Examples
    --------
    >>> from fl_elastic.testing.profiles import made_up_graph
    >>> [layer_in_turn(made_up_graph(3), number) for number in (5, 6, 7, 8, 10, 12)]
    [(), (2,), (2,), (1,), (0,), (2,)]
    """
    if server_round <= _FULL_ROUNDS:
        return ()
    layers = layers_of(graph)
    return layers[(server_round - _FULL_ROUNDS - 1) // _ROUNDS_PER_LAYER % len(layers)]


def layers_of(graph: BackwardGraph) -> tuple[tuple[int, ...], ...]:
    """Return the layers from the input to the output, each as the indices of its groups.

    A norm belongs to the layer before it; one at the very start is a layer of its own.

    Parameters
    ----------
    graph : BackwardGraph
        Of a training step.
    """
    layers: list[list[int]] = []
    for index in range(len(graph.groups) - 1, -1, -1):
        if graph.groups[index].kind is GroupKind.NORM and layers:
            layers[-1].append(index)
        else:
            layers.append([index])
    return tuple(tuple(layer) for layer in layers)
