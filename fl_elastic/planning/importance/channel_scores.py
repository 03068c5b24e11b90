"""Fisher potential of channels and of whole layers, and the norm of channels' weights."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import DivergedError, TrainingError
from fl_elastic.groups.from_inputs import loss_from_inputs
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.planning.importance.base import IMPORTANCES, Importance, Probe, Scores
from fl_elastic.planning.importance.channels import CHANNEL_SCORES, ChannelScore, ChannelScores
from fl_elastic.planning.importance.samples import checked_loss, norms_at_rest, single_examples
from fl_elastic.planning.importance.taps import Key, Layer, Taps, scored_layers


@CHANNEL_SCORES.register("fisher")
class FisherChannels(ChannelScore):
    r"""Fisher potential of a channel's activation, as in TinyTrain (Kwon et al., ICML 2024) and BlockSwap.

    :math:`\Delta_o = \frac{1}{2N} \sum_n (\sum_d a_{nd}\, g_{nd})^2` over N examples and the positions d of a
    channel. Here a is the activation after norm and activation function, and g the gradient of the example's own
    loss. An input channel is scored by the tensor that enters the layer. If a layer is used several times, its uses
    are summed before squaring.

    Examples are passed through the model one at a time, so that memory holds the activations of only one. This does
    not change the result, because BatchNorm uses its running statistics meanwhile. The loss must be a mean over
    examples.

    """

    batches_needed = 1
    by_example = True

    def score(self, probe: Probe, graph: BackwardGraph) -> dict[str, ChannelScores]:
        """Return the potentials by group name; raise DivergedError if they are not finite."""
        layers = scored_layers(probe.model, probe.groups, graph)
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        examples = 0
        with norms_at_rest(probe.model, probe.groups, probe.loss_fn):
            for batch, count in single_examples(probe.model, probe.batches):
                taps = Taps()
                with taps.listening(probe.model, layers):
                    loss, _ = loss_from_inputs(probe.model, probe.loss_fn, batch)
                gradients = taps.gradients(checked_loss(loss))
                for layer in layers:
                    name = layer.group.name
                    _add(inputs, layer, taps, taps.entering[name], gradients, count)
                    _add(outputs, layer, taps, taps.leaving[name], gradients, count)
                examples += count
        return {
            layer.group.name: ChannelScores(
                _potential(inputs.get(layer.group.name), examples),
                _potential(outputs.get(layer.group.name), examples),
            )
            for layer in layers
        }


def _add(
    sums: dict[str, Tensor],
    layer: Layer,
    taps: Taps,
    keys: list[Key],
    gradients: dict[Key, Tensor],
    count: int,
) -> None:
    """Add the squares of one pass of ``count`` examples to ``sums``."""
    found = [key for key in keys if key in gradients]
    if not found:
        return
    products = torch.stack(
        [_per_example(taps.tensors[key].value, gradients[key], layer, count) for key in found]
    )
    # The loss is a mean over the examples that were passed through together.
    squares = (products.sum(0) * count).square().sum(0)
    name = layer.group.name
    sums[name] = sums[name] + squares if name in sums else squares


def _per_example(value: Tensor, gradient: Tensor, layer: Layer, count: int) -> Tensor:
    """Return activation times gradient, summed over positions, shape (count, channels)."""
    product = (value.double() * gradient.double()).movedim(layer.channel_dimension, -1)
    channels = product.shape[-1]
    if product.numel() % (count * channels):
        raise TrainingError(
            f"activations of {layer.group.name!r} have shape {tuple(value.shape)} for {count} examples: "
            "take another channel score"
        )
    return product.reshape(count, -1, channels).sum(1)


def _potential(squares: Tensor | None, examples: int) -> NDArray[np.float64] | None:
    return None if squares is None else _finite(squares / (2 * examples))


@IMPORTANCES.register("fisher")
class FisherImportance(Importance):
    r"""Fisher potential of a layer, :math:`P_i = \sum_o \Delta_o` over its output channels (TinyTrain, ICML 2024).

    Only two-dimensional convolutions and linear layers have a potential, because TinyTrain trains nothing else. All
    other groups, including norms and single biases, get 0.
    """

    batches_needed = 1
    by_example = True

    def score(self, probe: Probe) -> Scores:
        """Return the potential of each group, shape (N,); raise DivergedError if it is not finite."""
        found = FisherChannels().once(probe, _graph_of_one_example(probe))
        return np.array(
            [_total(found[g.name].outputs) if g.name in found else 0.0 for g in probe.groups]
        )


def _graph_of_one_example(probe: Probe) -> BackwardGraph:
    with norms_at_rest(probe.model, probe.groups, probe.loss_fn):
        batch, _ = next(single_examples(probe.model, probe.batches))
        return trace_step(probe.model, probe.loss_fn, batch).graph


def _total(outputs: Scores | None) -> float:
    return 0.0 if outputs is None else float(outputs.sum())


@CHANNEL_SCORES.register("l2")
class WeightNormChannels(ChannelScore):
    """Euclidean norm of each channel's weights; larger norms are preferred (the "magnitude+" of tiny-training)."""

    def score(self, probe: Probe, graph: BackwardGraph) -> dict[str, ChannelScores]:
        """Return the norms by group name."""
        layers = scored_layers(probe.model, probe.groups, graph)
        return {
            layer.group.name: _norms(layer.module, layer.module.weight.detach()) for layer in layers
        }


def _norms(module: nn.Conv2d | nn.Linear, weight: Tensor) -> ChannelScores:
    """Return the norm of ``weight`` per input and output channel of ``module``."""
    groups = 1 if isinstance(module, nn.Linear) else module.groups
    # A separate axis for groups relates each input channel to the rows that read it.
    squares = weight.double().square().reshape(groups, len(weight) // groups, weight.shape[1], -1)
    return ChannelScores(
        inputs=_finite(squares.sum((1, 3)).flatten().sqrt()),
        outputs=_finite(squares.sum((2, 3)).flatten().sqrt()),
    )


def _finite(values: Tensor) -> NDArray[np.float64]:
    if not torch.isfinite(values).all():
        raise DivergedError(
            "channel scores are not finite: check the probe batch for NaN and the learning rate"
        )
    found: NDArray[np.float64] = values.cpu().numpy()
    return found
