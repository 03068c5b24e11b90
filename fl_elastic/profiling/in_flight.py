"""What a step holds besides what it keeps: activations and error gradients on their way between operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups.graph import BackwardGraph, BackwardNode
from fl_elastic.profiling.profile import Seconds

__all__ = ["InFlight", "in_flight", "ordered_with_weights"]

_FLOAT = 4
_BLOCK = 16
# Sides of the kernels that depthwise layers are trained by in place, on maps of at least that size.
_SMALL_KERNEL = 3
# Channels of an input that a library's convolutions take as they are, as pictures have.
_FIRST_CHANNELS = 3
# They hand the error gradient on as it is, in another shape at most.
_SAME_STORAGE = (
    "View", "UnsafeView", "Reshape", "Transpose", "TBackward", "Permute", "Squeeze", "Unsqueeze",
    "Add", "Clone", "Alias",
)  # fmt: skip
# They need their whole input and output at the same time, in any mode of the model.
_WHOLE_STEPS = (
    "Convolution", "Addmm", "Mm", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm",
    "MaxPool", "AvgPool", "Gelu",
)  # fmt: skip
# Processors multiply by a mask.
_DROPOUTS = ("Mul", "NativeDropout", "FusedDropout")


@dataclass(frozen=True, eq=False)
class InFlight:
    """Bytes that are neither kept nor gradients of weights; arrays have shape (M,), in backward order.

    Attributes
    ----------
    passing : array
        While each node runs backward and passes the error gradient on: what comes into it, what it puts out, and
        what waits for other branches. An activation lives as long as its error gradient, so the forward pass
        holds as much at the same place.
    ending : array
        The same of a node that passes nothing on.
    dropping : array
        ``passing`` of nodes that inference may leave out: a dropout, and with it the weights of an attention, which
        torch never holds where it drops nothing. 0 of others.
    inference : float
        The least that one inference holds at its peak: what a device must have in any case.
    """

    passing: Seconds
    ending: Seconds
    dropping: Seconds
    inference: float


@lru_cache(maxsize=64)
def in_flight(graph: BackwardGraph) -> InFlight:
    """Return what is on its way at each node of a graph; tensors of unknown shape count as nothing."""
    count = len(graph.nodes)
    sizes = [_FLOAT * float(math.prod(node.shape)) if node.shape else 0.0 for node in graph.nodes]
    first, storage, end = list(range(count)), list(range(count)), list(range(count))
    inference = 0.0
    for index, node in enumerate(graph.nodes):
        hands_on = node.name.startswith(_SAME_STORAGE)
        for below in node.inputs:
            if first[below] != below:
                continue
            # The first that reads this node's output makes its error gradient.
            first[below] = index
            if hands_on and sizes[below] == sizes[index]:
                storage[below] = storage[index]
                end[storage[index]] = max(end[storage[index]], below)
        if node.name.startswith(_WHOLE_STEPS):
            at_once = sizes[index] + sum(sizes[i] for i in node.inputs)
            if node.name.startswith("MaxPool"):
                # Where each maximum was, as eight bytes, also where nobody asks for it.
                at_once += 2 * sizes[index]
            if "Convolution" in node.name:
                at_once += _ordered_in_inference(graph, node)
            inference = max(inference, at_once)
    started, ended, made = (np.zeros(count + 1) for _ in range(3))
    for index in range(count):
        if storage[index] == index:
            started[first[index]] += sizes[index]
            ended[end[index] + 1] += sizes[index]
            if first[index] != index:
                made[first[index]] += sizes[index]
    passing = np.cumsum(started - ended)[:count]
    ordered = np.zeros(count)
    for index, node in enumerate(graph.nodes):
        if "Convolution" in node.name:
            ordered[index] = _ordered_in_backward(graph, node)
    dropping = np.where([_may_drop(node) for node in graph.nodes], passing, 0.0)
    return InFlight(passing + ordered, passing - made[:count] + ordered, dropping, inference)


def _may_drop(node: BackwardNode) -> bool:
    """Whether it multiplies what comes in with what no layer made, as a dropout's mask."""
    return node.group is None and len(node.inputs) == 1 and node.name.startswith(_DROPOUTS)


def _ordered_in_backward(graph: BackwardGraph, node: BackwardNode) -> float:
    """Return the bytes of what a library puts into an order of its own: weights, and maps of no whole blocks."""
    weights = 0 if node.group is None else graph.groups[node.group].numel
    numbers = weights + sum(_blocked(graph.nodes[below].shape) for below in node.inputs)
    # A transposed layer's few channels are what goes into the convolution that it transposes, and stay as they are.
    if not (_is_transposed(graph, node) and node.shape[1] <= _FIRST_CHANNELS):
        numbers += _blocked(node.shape)
    return float(_FLOAT * numbers)


def ordered_with_weights(graph: BackwardGraph, channels_last: NDArray[np.int64]) -> Seconds:
    """Return the bytes in another order that each convolution takes besides where its own weights are trained.

    Of maps with the channels last: their gradient before it is put in order, and the weights as they are read,
    unless those lie that way already. A depthwise layer's gradient, beyond small kernels, is padded to blocks of
    channels on both sides, of which it fills one entry.
    """
    bytes_ = np.zeros(len(graph.nodes))
    for index in np.flatnonzero(channels_last):
        node = graph.nodes[index]
        if node.group is None or "Convolution" not in node.name:
            continue
        weight = max(graph.groups[node.group].shapes, key=math.prod)
        read = [graph.nodes[below].shape for below in node.inputs]
        depthwise = len(weight) == 4 and weight[1] == 1 and weight[0] > 1
        least = min((min(shape[2:]) for shape in read if len(shape) == 4), default=0)
        small = max(weight[2:], default=0) <= min(_SMALL_KERNEL, least)
        if not depthwise:
            bytes_[index] = (3 - channels_last[index]) * _FLOAT * math.prod(weight)
        elif not small:
            bytes_[index] = _BLOCK**2 * _FLOAT * math.prod(weight)
    return bytes_


def _ordered_in_inference(graph: BackwardGraph, node: BackwardNode) -> float:
    """Return the bytes that a convolution's maps take in blocks in any case, besides its input and output.

    Its output is in blocks before it is put in order; its input is no more by then.
    """
    if _is_transposed(graph, node):
        return 0.0
    given = [graph.nodes[below].shape for below in node.inputs]
    entering = sum(_blocked(shape) for shape in given if shape and shape[1] > _BLOCK)
    leaving, plain = _blocked(node.shape), math.prod(node.shape)
    return float(_FLOAT * max(leaving, entering + leaving - plain))


def _is_transposed(graph: BackwardGraph, node: BackwardNode) -> bool:
    """Whether the first axis of a convolution's weight is its input's channels, as far as shapes tell."""
    if node.group is None or len(node.shape) < 2:
        return False
    return max(graph.groups[node.group].shapes, key=math.prod)[0] != node.shape[1]


def _blocked(shape: tuple[int, ...]) -> int:
    """Return the numbers of a map in whole blocks of channels; 0 where it is so already."""
    if len(shape) < 3 or shape[1] % _BLOCK == 0:
        return 0
    return math.prod(shape) // shape[1] * (-(-shape[1] // _BLOCK) * _BLOCK)
