"""Multiply-adds of one step, counted from the shapes of its layers; one multiply-add counts as 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph, GroupKind
from fl_elastic.profiling.layer_shapes import entering_shape, is_transposed, weight_shape
from fl_elastic.profiling.profile import Mask, Seconds


def node_macs(graph: BackwardGraph) -> Seconds:
    """Return the multiply-adds of each node's forward pass over the whole batch, shape (M,).

    A convolution takes H_o W_o C_o C_i / groups k^2 per example, a linear layer out x in per row. Nodes without a
    weight, norms, recurrent layers and nodes of unknown shape count as 0.
    """
    return np.array([_macs_of(graph, index) for index in range(len(graph.nodes))])


def group_macs(graph: BackwardGraph) -> Seconds:
    """Return the multiply-adds of each group's layer over the whole batch, shape (N,).

    A layer that is used several times counts for each use.
    """
    own = np.zeros(len(graph.groups))
    for node, macs in zip(graph.nodes, node_macs(graph), strict=True):
        if node.group is not None:
            own[node.group] += macs
    return own


def backward_macs(graph: BackwardGraph, modes: Sequence[Mode]) -> float:
    """Return the multiply-adds of the backward pass over the whole batch.

    Passing the error gradient through a layer costs as much as its forward pass. Training the layer costs as much
    again, times the trained share of its channels. A gradient filtered over patches of side r takes 1 / (r^2 k^2)
    of the exact one (Yang, Li and Marculescu, CVPR 2023). Training a bias takes no multiply-adds besides the path.

    Parameters
    ----------
    graph : BackwardGraph
        Graph of a model whose nodes have known shapes.
    modes : sequence of Mode
        How each group is trained, in backward order.
    """
    passing = passing_nodes(graph, np.array([not mode.is_frozen for mode in modes]))
    total = 0.0
    for index, macs in enumerate(node_macs(graph).tolist()):
        group = graph.nodes[index].group
        mode = Mode.FROZEN if group is None else modes[group]
        shape = weight_shape(graph, graph.nodes[index])
        filtered = 1 / (mode.patch**2 * math.prod(shape[2:]))
        if passing[index]:
            total += macs * (filtered if mode.filters_input else 1.0)
        if mode.kind in ("full", "channels", "filtered"):
            share = _channel_share(shape, mode) if mode.kind == "channels" else 1.0
            total += macs * (filtered if mode.kind == "filtered" else share)
    return total


def passing_nodes(graph: BackwardGraph, mask: Mask) -> Mask:
    """Return a mask of the nodes that pass the error gradient on: those above a trained group, shape (M,)."""
    running = np.zeros(len(graph.nodes), dtype=bool)
    passing = np.zeros(len(graph.nodes), dtype=bool)
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        passing[index] = any(running[below] for below in node.inputs)
        running[index] = passing[index] or (node.group is not None and bool(mask[node.group]))
    return passing


def _macs_of(graph: BackwardGraph, index: int) -> float:
    node = graph.nodes[index]
    if node.group is None or not node.shape:
        return 0.0
    group = graph.groups[node.group]
    weights = sum(math.prod(shape) for shape in group.shapes if len(shape) > 1)
    if group.kind is GroupKind.LINEAR:
        return float(weights * math.prod(node.shape[:-1]))
    if group.kind is not GroupKind.CONV:
        return 0.0
    positions = math.prod(node.shape[2:])
    given = entering_shape(graph, node)
    # A transposed convolution has one product per input position.
    if len(given) > 2 and is_transposed(weight_shape(graph, node), given, node.shape):
        positions = math.prod(given[2:])
    return float(weights * node.shape[0] * positions)


def _channel_share(shape: tuple[int, ...], mode: Mode) -> float:
    if len(shape) < 2:
        return 0.0
    channels = shape[0] if mode.axis != "in" or shape[1] == 1 else shape[1]
    return mode.channel_count(channels) / channels
