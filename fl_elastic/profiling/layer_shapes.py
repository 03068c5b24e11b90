"""Shapes of convolutions and linear layers, on which all published cost rules are based."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_elastic.groups.graph import BackwardGraph, BackwardNode, GroupKind

STRIDED = 1.5
"""Least ratio of the positions of its two maps at which a convolution counts as strided."""
Size = tuple[int, int]


@dataclass(frozen=True)
class LayerShape:
    """Shape of one convolution or linear layer, for one example.

    Attributes
    ----------
    name : str
        Name of its tensor group.
    in_channels, out_channels : int
        Channels or features.
    kernel : (int, int)
        Height and width of the kernel; 1 x 1 for a linear layer.
    groups : int
        As in ``torch.nn.Conv2d``; equal to the channels for a depthwise layer.
    in_size, out_size : (int, int)
        Height and width of input and output; rows x 1 for a linear layer.
    """

    name: str
    in_channels: int
    out_channels: int
    kernel: Size = (1, 1)
    groups: int = 1
    in_size: Size = (1, 1)
    out_size: Size = (1, 1)

    @property
    def weights(self) -> int:
        """Number of weights without the bias."""
        return self.out_channels * (self.in_channels // self.groups) * math.prod(self.kernel)

    @property
    def is_depthwise(self) -> bool:
        """Whether each output channel reads a single one of several input channels."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a dense convolution with kernel 1, or a linear layer."""
        return self.groups == 1 and math.prod(self.kernel) == 1


def group_layers(graph: BackwardGraph, input_shape: Sequence[int] = ()) -> dict[int, LayerShape]:
    """Return the shape of each convolution and linear layer by group index, in backward order.

    Groups of other kinds, transposed convolutions and layers of unknown shape are left out. A layer that is used
    several times appears with its deepest use.

    Parameters
    ----------
    graph : BackwardGraph
        A graph whose nodes have known shapes.
    input_shape : sequence of int
        Shape of the model's input, batch first, as in a profile's key; the graph does not contain it. Without it
        the input of the first layer is assumed to have the height and width of its output.
    """
    batch = _batch(graph, input_shape)
    found = {}
    for index, owners in enumerate(graph.group_nodes()):
        layer = _layer(graph, index, owners[-1], batch, input_shape) if owners else None
        if layer is not None:
            found[index] = layer
    return found


def _layer(
    graph: BackwardGraph, index: int, place: int, batch: int, input_shape: Sequence[int]
) -> LayerShape | None:
    group, node = graph.groups[index], graph.nodes[place]
    weight = weight_shape(graph, node)
    given = entering_shape(graph, node, tuple(input_shape))
    if group.kind is GroupKind.LINEAR and len(weight) == 2 and node.shape:
        rows = max(1, math.prod(node.shape[:-1]) // batch)
        outputs = node.shape[-1]
        inputs = math.prod(weight) // outputs
        return LayerShape(group.name, inputs, outputs, in_size=(rows, 1), out_size=(rows, 1))
    is_plain = (
        len(weight) in (3, 4) and len(node.shape) == len(weight) and node.shape[1] == weight[0]
    )
    if group.kind is not GroupKind.CONV or not is_plain:
        return None
    if is_transposed(weight, given, node.shape):
        return None
    if len(given) != len(weight) or given[1] % weight[1]:
        given = (batch, weight[1], *node.shape[2:])
    return LayerShape(
        group.name,
        in_channels=given[1],
        out_channels=weight[0],
        kernel=_pair(weight[2:]),
        groups=given[1] // weight[1],
        in_size=_pair(given[2:]),
        out_size=_pair(node.shape[2:]),
    )


def weight_shape(graph: BackwardGraph, node: BackwardNode) -> tuple[int, ...]:
    """Return the shape of a layer's weight; (0,) if no group owns it, as below a cut."""
    if node.group is None:
        return (0,)
    return max(graph.groups[node.group].shapes, key=math.prod)


def entering_shape(
    graph: BackwardGraph, node: BackwardNode, input_shape: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the shape of what a layer reads: a deeper operation's output, or the model's input; empty if unknown.

    The graph does not contain the model's input. A first convolution reads something else if it has another number
    of axes or channels, or if its output is larger, as where a model enlarges its input.
    """
    if node.inputs:
        return graph.nodes[node.inputs[0]].shape
    weight, leaving = weight_shape(graph, node), node.shape
    if len(weight) < 3 or not input_shape:
        return input_shape
    if len(input_shape) != len(weight) or len(leaving) != len(weight):
        return ()
    if weight[0] != leaving[1]:
        return input_shape if weight[0] == input_shape[1] else ()
    fits = input_shape[1] % weight[1] == 0
    return (
        input_shape if fits and positions_of(leaving) <= STRIDED * positions_of(input_shape) else ()
    )


def is_transposed(
    weight: tuple[int, ...], entering: tuple[int, ...], leaving: tuple[int, ...]
) -> bool:
    """Return whether the first axis of a convolution's weight runs over input channels, as far as shapes show."""
    if weight[0] and weight[0] != leaving[1]:
        return True
    return positions_of(leaving) > STRIDED * positions_of(entering) > 0


def positions_of(shape: tuple[int, ...]) -> int:
    """Return the number of positions of a map, batch and channels first; 0 if it has none."""
    return math.prod(shape[2:]) if len(shape) > 2 else 0


def _batch(graph: BackwardGraph, input_shape: Sequence[int]) -> int:
    if input_shape:
        return max(1, input_shape[0])
    # Operations may merge other axes into the first one, which makes it longer, but never shorter than the batch.
    return min((node.shape[0] for node in graph.nodes if len(node.shape) > 1), default=1) or 1


def _pair(sizes: Sequence[int]) -> Size:
    return (sizes[0], sizes[1]) if len(sizes) > 1 else (sizes[0], 1)
