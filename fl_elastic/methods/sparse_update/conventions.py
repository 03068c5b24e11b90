"""What a plan costs by the rules of two published systems, so that it can stand beside their tables.

Both rules are for models whose norms are folded into the convolutions, and for one example at a time. They say what
was printed, not what a step really takes: that is `fl_elastic.profiling.step_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph, GroupKind
from fl_elastic.groups.mode import Axis
from fl_elastic.profiling.layer_shapes import LayerShape, group_layers

__all__ = [
    "LayerUpdate",
    "LegacyCosts",
    "legacy_costs",
    "tiny_training_bits",
    "tinytrain_bytes",
    "tinytrain_full_macs",
    "tinytrain_macs",
]

_FLOAT_BYTES = 4
# Weight, gradient and two moments of Adam.
_ADAM_BYTES = 16


@dataclass(frozen=True)
class LayerUpdate:
    """What is trained of one layer.

    Attributes
    ----------
    fraction : float
        Share of the channels whose weights are trained; 0 for none.
    bias : bool
        Whether the bias is trained.
    axis : {"in", "out"}
        Which channels ``fraction`` speaks of.
    """

    fraction: float = 0.0
    bias: bool = False
    axis: Axis = "in"

    def inputs(self, layer: LayerShape) -> int:
        """Return how many input channels must be kept for the backward pass."""
        if not self.fraction:
            return 0
        by_input = self.axis == "in" or layer.is_depthwise
        return _share(layer.in_channels, self.fraction) if by_input else layer.in_channels

    def weights(self, layer: LayerShape) -> int:
        """Return how many weights are trained."""
        if not self.fraction:
            return 0
        by_input = self.axis == "in" and not layer.is_depthwise
        channels = layer.in_channels if by_input else layer.out_channels
        return layer.weights // channels * _share(channels, self.fraction)


def tinytrain_macs(layers: Sequence[LayerShape], updates: Sequence[LayerUpdate]) -> float:
    """Return the backward multiply-adds by TinyTrain's rule (Kwon et al., ICML 2024, tables 2 and 3).

    Every layer after the first one with trained weights passes the error gradient on, at the price of its forward
    pass; a trained layer costs its forward pass times the trained share. Biases count as nothing.

    Parameters
    ----------
    layers : sequence of LayerShape
        From the input to the loss.
    updates : sequence of LayerUpdate
        One per layer.
    """
    pairs = list(zip(layers, updates, strict=True))
    trained = [index for index, (_, update) in enumerate(pairs) if update.fraction]
    if not trained:
        return 0.0
    passed = sum(layer.macs for layer in layers[trained[0] + 1 :])
    own = sum(layer.macs * update.weights(layer) / layer.weights for layer, update in pairs)
    return passed + own


def tinytrain_full_macs(layers: Sequence[LayerShape]) -> int:
    """Return what TinyTrain prints for training everything: twice the forward pass, the first layer included."""
    return 2 * sum(layer.macs for layer in layers)


def tinytrain_bytes(layers: Sequence[LayerShape], updates: Sequence[LayerUpdate]) -> float:
    """Return the backward memory by TinyTrain's rule for partial training.

    The largest working set of the forward pass in fp32, input plus output over groups of one layer, and 16 bytes
    (weight, gradient, two moments) per trained weight. Saved activations lie below that peak and do not show.
    """
    peak = max((layer.in_values + layer.out_values / layer.groups for layer in layers), default=0.0)
    trained = sum(u.weights(layer) for layer, u in zip(layers, updates, strict=True))
    return _FLOAT_BYTES * peak + _ADAM_BYTES * trained


def tiny_training_bits(
    layers: Sequence[LayerShape], updates: Sequence[LayerUpdate], classifier_inputs: int
) -> int:
    """Return the extra memory by the rule of tiny-training (Lin et al., NeurIPS 2022), in bits.

    One bit per output of every convolution whose bias is trained, and 32 per such bias; 8 bits per kept input and
    per trained weight; 8 per input of the classifier, whose own weights are not counted. Its published labels are
    this over 8 x 1024, rounded down.

    Parameters
    ----------
    layers : sequence of LayerShape
        Without the classifier.
    updates : sequence of LayerUpdate
        One per layer.
    classifier_inputs : int
        Features that enter the classifier.
    """
    bits = 8 * classifier_inputs
    for layer, update in zip(layers, updates, strict=True):
        if update.bias:
            bits += layer.out_values + 32 * layer.out_channels
        kept = update.inputs(layer) * math.prod(layer.in_size)
        bits += 8 * (kept + update.weights(layer))
    return bits


@dataclass(frozen=True)
class LegacyCosts:
    """A plan's costs by both rules, for one example.

    Attributes
    ----------
    tinytrain_macs : float
        Backward multiply-adds.
    tinytrain_bytes : float
        Forward peak and trained weights.
    tiny_training_bytes : float
        Extra memory of an int8 model.
    """

    tinytrain_macs: float
    tinytrain_bytes: float
    tiny_training_bytes: float


def legacy_costs(
    graph: BackwardGraph, modes: Sequence[Mode], input_shape: Sequence[int] = ()
) -> LegacyCosts:
    """Return what a plan of any traced model costs by both rules.

    A trained norm counts as the bias of the convolution before it, with which it would be folded. A filtered
    gradient counts as the whole one: neither rule knows it. The head is the classifier if it is a linear layer:
    TinyTrain's rule, made for models without one, counts it like any layer, tiny-training's by its input alone.

    Parameters
    ----------
    graph : BackwardGraph
        Of a model whose nodes have known shapes.
    modes : sequence of Mode
        How each group is trained, in backward order.
    input_shape : sequence of int
        See `fl_elastic.profiling.layer_shapes.group_layers`.
    """
    found = group_layers(graph, input_shape)
    folded = _layers_with_trained_norm(graph, modes)
    updates = {
        index: _update(modes[index], bool(graph.groups[index].vectors()), index in folded)
        for index in found
    }
    order = list(reversed(found))
    layers, changes = [found[i] for i in order], [updates[i] for i in order]
    head = graph.head if graph.groups[graph.head].kind is GroupKind.LINEAR else None
    inner = [i for i in order if i != head]
    features = found[head].in_channels if head in found else 0
    bits = tiny_training_bits([found[i] for i in inner], [updates[i] for i in inner], features)
    return LegacyCosts(tinytrain_macs(layers, changes), tinytrain_bytes(layers, changes), bits / 8)


def _update(mode: Mode, has_bias: bool, folded: bool) -> LayerUpdate:
    bias = folded or (has_bias and not mode.is_frozen)
    if mode.kind == "channels":
        return LayerUpdate(mode.fraction, bias, mode.axis)
    return LayerUpdate(1.0 if mode.kind in ("full", "filtered") else 0.0, bias)


def _layers_with_trained_norm(graph: BackwardGraph, modes: Sequence[Mode]) -> set[int]:
    """Return the groups whose output goes straight into a norm that is trained."""
    below = [
        graph.nodes[node.inputs[0]].group
        for node in graph.nodes
        if node.group is not None
        and node.inputs
        and graph.groups[node.group].kind is GroupKind.NORM
        and not modes[node.group].is_frozen
    ]
    return {group for group in below if group is not None}


def _share(channels: int, fraction: float) -> int:
    return max(1, int(channels * fraction))
