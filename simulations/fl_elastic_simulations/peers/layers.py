"""The layers of a model as its tensor groups show them: an operation with weights, and its norm."""

from __future__ import annotations

from fl_elastic.groups import BackwardGraph, GroupKind

__all__ = ["layers_of"]


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
