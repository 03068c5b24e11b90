"""Memory of a step besides what it keeps: activations and error gradients on their way between operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fl_elastic.groups.graph import BackwardGraph, BackwardNode
from fl_elastic.profiling.profile import Seconds
from fl_elastic.profiling.reordered_copies import ReorderedBytes, reordered_bytes

_FLOAT = 4
# These operations pass the error gradient on unchanged, possibly in another shape.
_SAME_STORAGE = (
    "View", "UnsafeView", "Reshape", "Transpose", "TBackward", "Permute", "Squeeze", "Unsqueeze",
    "Add", "Clone", "Alias",
)  # fmt: skip
# These hand on parts of the error gradient, all of which stays while any of them is needed.
_PARTS = ("Cat", "Stack")
# These operations need their whole input and output at the same time, in any mode of the model.
_WHOLE_STEPS = (
    "Convolution", "Addmm", "Mm", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm",
    "MaxPool", "AvgPool", "Gelu",
)  # fmt: skip
# The scalar of these losses holds the memory of its input before the mean until the end of the step.
_LOSSES = ("MseLoss", "SmoothL1Loss", "HuberLoss")
# On CPUs dropout is a multiplication by a mask.
_DROPOUTS = ("Mul", "NativeDropout", "FusedDropout")


@dataclass(frozen=True, eq=False)
class InFlight:
    """Bytes that are neither kept nor gradients of weights; arrays have shape (M,), in backward order.

    Attributes
    ----------
    passing : array
        While each node runs backward and passes the error gradient on: its incoming and outgoing error gradients,
        and those that wait for other branches. An activation lives as long as its error gradient, so the forward
        pass holds as much at the same place.
    ending : array
        The same for a node that passes nothing on.
    dropping : array
        ``passing`` of nodes that inference may skip: a dropout, and with it the weights of an attention, which
        torch does not store if nothing is dropped. 0 for other nodes.
    training : array
        Extra bytes of a layer while its own weights are trained.
    inference : float
        The least peak of one inference: what a device must have in any case.
    """

    passing: Seconds
    ending: Seconds
    dropping: Seconds
    training: Seconds
    inference: float


@lru_cache(maxsize=64)
def in_flight(
    graph: BackwardGraph, channels_last: tuple[int, ...] = (), threads: int = 1
) -> InFlight:
    """Return the bytes on their way at each node of a graph; tensors of unknown shape count as zero.

    Parameters
    ----------
    graph : BackwardGraph
        Graph of the model.
    channels_last : tuple of int
        See `SavedTensors.channels_last`, for each node; zero by default.
    threads : int
        Number of torch threads.
    """
    count = len(graph.nodes)
    sizes = [_FLOAT * float(math.prod(node.shape)) if node.shape else 0.0 for node in graph.nodes]
    first, storage, end = list(range(count)), list(range(count)), list(range(count))
    inference, last = 0.0, channels_last or (0,) * count
    orders = [ReorderedBytes()] * count
    for index, node in enumerate(graph.nodes):
        hands_on = node.name.startswith(_SAME_STORAGE)
        for below in node.inputs:
            if first[below] != below:
                continue
            # The first node that reads this output creates its error gradient.
            first[below] = index
            if node.name.startswith(_PARTS) or (hands_on and sizes[below] == sizes[index]):
                storage[below] = storage[index]
                end[storage[index]] = max(end[storage[index]], below)
        if node.name.startswith(_WHOLE_STEPS):
            # The model's own input exists anyway.
            at_once = sizes[index] + sum(
                sizes[i] for i in node.inputs if not _is_given(graph.nodes[i])
            )
            if node.name.startswith("MaxPool"):
                # The position of each maximum, as eight bytes, is computed even if nobody needs it.
                at_once += 2 * sizes[index]
            if "Convolution" in node.name:
                orders[index] = each = reordered_bytes(graph, node, last[index], threads)
                at_once += each.inference
            inference = max(inference, at_once)
    started, ended, made = (np.zeros(count + 1) for _ in range(3))
    for index in range(count):
        if storage[index] == index:
            started[first[index]] += sizes[index]
            ended[end[index] + 1] += sizes[index]
            if first[index] != index:
                made[first[index]] += sizes[index]
        if graph.nodes[index].name.startswith(_LOSSES):
            started[index] += max((sizes[i] for i in graph.nodes[index].inputs), default=0.0)
    passing = np.cumsum(started - ended)[:count]
    dropping = np.where([_may_drop(node) for node in graph.nodes], passing, 0.0)
    handed = np.array([each.passing for each in orders])
    return InFlight(
        passing + handed,
        passing - made[:count] + handed,
        dropping,
        np.array([each.training for each in orders]) - handed,
        inference,
    )


def _is_given(node: BackwardNode) -> bool:
    """Return whether a node stands for a model input, which `loss_from_inputs` copies."""
    return node.name.startswith("Clone") and node.group is None and not node.inputs


def _may_drop(node: BackwardNode) -> bool:
    """Return whether a node multiplies its input with something that no layer made, such as a dropout mask."""
    return node.group is None and len(node.inputs) == 1 and node.name.startswith(_DROPOUTS)
