"""What a scheme costs by the rule of its paper, so that it can stand beside the published labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fl_elastic.groups.mode import Axis
from fl_elastic.profiling.layer_shapes import LayerShape

__all__ = ["LayerUpdate", "tiny_training_bits"]


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


def _share(channels: int, fraction: float) -> int:
    return max(1, int(channels * fraction))
