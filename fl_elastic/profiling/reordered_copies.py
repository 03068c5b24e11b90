"""Extra memory of convolutions: oneDNN copies maps and filters into blocks of sixteen channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fl_elastic.groups.graph import BackwardGraph, BackwardNode
from fl_elastic.profiling.layer_shapes import (
    STRIDED,
    entering_shape,
    is_transposed,
    positions_of,
    weight_shape,
)

_FLOAT = 4
_BLOCK = 16
# Largest kernel whose gradient depthwise layers compute in place, on maps of at least this size.
_SMALL_KERNEL = 3
# Most channels of an input that is read without reordering, such as a picture.
_FIRST_CHANNELS = 3
# Largest single example, in numbers, that torch convolves without oneDNN.
_BY_ITSELF = 20_480


@dataclass(frozen=True)
class ReorderedBytes:
    """Bytes of reordered copies at one convolution, as torch's allocations on an x86 processor show them.

    Attributes
    ----------
    inference : float
        At the peak of its forward pass, besides its input and output.
    passing : float
        While it passes the error gradient on, besides the error gradients of its output and input.
    training : float
        While its weights' gradient is computed, besides the error gradients and the weights' gradient.
    """

    inference: float = 0.0
    passing: float = 0.0
    training: float = 0.0


def reordered_bytes(
    graph: BackwardGraph,
    node: BackwardNode,
    channels_last: int = 0,
    threads: int = 1,
    batch_shape: tuple[int, ...] = (),
) -> ReorderedBytes:
    """Return the bytes of a convolution's reordered copies.

    A transposed convolution runs the backward pass of the plain one that it transposes, so its output has the role
    of the plain one's input. Some convolutions are not reordered, because torch computes them itself by the rule in
    its ``use_mkldnn``: a matrix product at each position for few examples in one thread, and a small single
    example.

    Parameters
    ----------
    graph : BackwardGraph
        Graph of the model.
    node : BackwardNode
        Node of the convolution.
    channels_last : int
        See `SavedTensors.channels_last`: maps in this format are not reordered.
    threads : int
        Number of torch threads.
    batch_shape : tuple of int
        Shape of the model's input, which a first layer reads.
    """
    weight = weight_shape(graph, node)
    entering, leaving = entering_shape(graph, node, batch_shape), node.shape
    if len(leaving) < 3:
        return ReorderedBytes()
    turned = is_transposed(weight, entering, leaving)
    picture, features = (leaving, entering) if turned else (entering, leaving)
    strided = positions_of(picture) > STRIDED * positions_of(features) > 0
    kernel, filters = max(weight[2:], default=2), float(_FLOAT * math.prod(weight))
    if kernel == 1 and not strided and threads == 1 and leaving[0] < _BLOCK:
        return ReorderedBytes()
    if _is_small(entering, leaving) and kernel <= _SMALL_KERNEL and not _is_depthwise(weight):
        columns = float(_FLOAT * math.prod(features[2:]) * math.prod(weight[1:]))
        return ReorderedBytes(0.0, columns, columns)
    if channels_last:
        return ReorderedBytes(filters, filters, filters + _of_last(weight, entering))
    there = float(_FLOAT * _there(picture, features, math.prod(weight)))
    back = float(_FLOAT * _back(picture, features, math.prod(weight), strided=strided))
    inference, passing = (back, there) if turned else (there, back)
    both = _blocked(features) + _blocked(picture) * (_channels(picture) > _FIRST_CHANNELS)
    if _is_depthwise(weight) and kernel > _SMALL_KERNEL:
        both = 0
    return ReorderedBytes(
        inference,
        passing,
        max(filters + _FLOAT * both, passing),
    )


def _there(picture: tuple[int, ...], features: tuple[int, ...], filters: int) -> int:
    """Return the peak of extra numbers of the pass from picture to features, besides these two as they are stored.

    First, filters, picture and features exist in blocks; then the features exist twice, in blocks and as stored.
    """
    read = _blocked(picture) if _channels(picture) >= _BLOCK else 0
    return max(filters + read + _blocked(features) - math.prod(features), _blocked(features))


def _back(
    picture: tuple[int, ...], features: tuple[int, ...], filters: int, *, strided: bool
) -> int:
    """Return the peak of extra numbers of the pass back from features to picture, counted as in `_there`.

    With a stride the picture exists three times.
    """
    made, read, plain = _blocked(picture), _blocked(features), math.prod(picture) if picture else 0
    if not strided:
        return max(filters + read + made - plain, made)
    return max(filters + read, 2 * plain)


def _of_last(weight: tuple[int, ...], entering: tuple[int, ...]) -> float:
    """Return the extra bytes of training the weights if maps are stored channels last.

    These are the gradient before it is reordered, and a copy of the weights. A depthwise layer's gradient, except
    for small kernels, is padded to blocks of channels on both axes, of each of which it fills a single entry.
    """
    filters = float(_FLOAT * math.prod(weight))
    if not _is_depthwise(weight):
        return 2 * filters
    least = min(entering[2:], default=0)
    small = max(weight[2:]) <= min(_SMALL_KERNEL, least)
    return 0.0 if small else _BLOCK**2 * filters


def _is_depthwise(weight: tuple[int, ...]) -> bool:
    return len(weight) > 2 and weight[1] == 1 and weight[0] > 1


def _is_small(entering: tuple[int, ...], leaving: tuple[int, ...]) -> bool:
    """Return whether the input is a single example so small that torch does not use oneDNN."""
    return leaving[0] == 1 and math.prod(entering) <= _BY_ITSELF


def _channels(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) > 1 else 0


def _blocked(shape: tuple[int, ...]) -> int:
    """Return the number of values of a map padded to whole blocks of channels."""
    if len(shape) < 3 or not shape[1]:
        return 0
    return math.prod(shape) // shape[1] * (-(-shape[1] // _BLOCK) * _BLOCK)
