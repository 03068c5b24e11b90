"""The cost of a scheme by the rule of its paper, comparable with the published labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_elastic.groups.mode import Axis
from fl_elastic.profiling.layer_shapes import LayerShape

__all__ = ["LayerUpdate", "tiny_training_bits"]


@dataclass(frozen=True)
class LayerUpdate:
    """Which part of one layer is trained.

    Attributes
    ----------
    fraction : float
        Share of the channels whose weights are trained; 0 for none.
    bias : bool
        Whether the bias is trained.
    axis : {"in", "out"}
        The channels that ``fraction`` refers to.
    """

    fraction: float = 0.0
    bias: bool = False
    axis: Axis = "in"

    def inputs(self, layer: LayerShape) -> int:
        """Return the number of input channels to keep for the backward pass."""
        if not self.fraction:
            return 0
        by_input = self.axis == "in" or layer.is_depthwise
        return _share(layer.in_channels, self.fraction) if by_input else layer.in_channels

    def weights(self, layer: LayerShape) -> int:
        """Return the number of trained weights."""
        if not self.fraction:
            return 0
        by_input = self.axis == "in" and not layer.is_depthwise
        channels = layer.in_channels if by_input else layer.out_channels
        return layer.weights // channels * _share(channels, self.fraction)


def tiny_training_bits(
    layers: Sequence[LayerShape], updates: Sequence[LayerUpdate], classifier_inputs: int
) -> int:
    """Return the extra memory by the rule of tiny-training (Lin et al., NeurIPS 2022), in bits.

    It counts one bit per output of every convolution whose bias is trained, and 32 bits per such bias; 8 bits per
    kept input and per trained weight; and 8 bits per input of the classifier, whose own weights are not counted.
    The published labels are this number over 8 x 1024, rounded down.

    Parameters
    ----------
    layers : sequence of LayerShape
        All layers except the classifier.
    updates : sequence of LayerUpdate
        One per layer.
    classifier_inputs : int
        Number of input features of the classifier.
    """
    bits = 8 * classifier_inputs
    for layer, update in zip(layers, updates, strict=True):
        if update.bias:
            bits += layer.out_values + 32 * layer.out_channels
        kept = update.inputs(layer) * math.prod(layer.in_size)
        bits += 8 * (kept + update.weights(layer))
    return bits


def _share(channels: int, fraction: float) -> int:
    return max(1, int(channels * fraction))
