"""Statistics of a set of examples at every layer, from forward passes: the input of learned selectors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import as_pair, batch_size
from fl_elastic.groups.forward import call_model
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.planning.importance.base import Probe
from fl_elastic.planning.importance.channels import ChannelScore, ChannelScores
from fl_elastic.planning.importance.samples import micro_batches, norms_at_rest
from fl_elastic.planning.importance.taps import Key, Layer, Taps, scored_layers

_OF_CHANNEL = ("mean", "spread", "between", "energy", "weight")
_OF_LAYER = ("mean", "energy", "weight")
FEATURES = (
    *_OF_CHANNEL, *(f"layer_{name}" for name in _OF_LAYER), "depth", "channels", "fan_in", "positions", "outputs",
    "depthwise", "linear",
)  # fmt: skip
"""Names of the columns of a summary, see `LayerSummary`."""

_PLACES = {name: place for place, name in enumerate(FEATURES)}
_EXAMPLES = 16

Columns = NDArray[np.float64]

_TINY = 1e-8
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LayerSummary:
    """Statistics of a set at the input and output of a layer, one row per channel.

    The columns are listed in `FEATURES`. Columns of a channel are logarithms to base 10 minus their mean over the
    layer: of the absolute mean over examples of the activation averaged over positions; of its standard deviation;
    of the root mean square over examples and positions; and of the norm of the channel's weights. One more is the
    share, in [0, 1], of the variance that lies between classes (0 if targets are no classes). Columns of the layer
    are the means of these logarithms, the depth from the loss in [0, 1], the logarithms of the numbers of channels,
    weights per output channel and positions, and flags: whether these are outputs, whether the layer is depthwise,
    whether it is linear.

    Attributes
    ----------
    inputs : array, shape (C_in, F)
        Statistics of the layer's input.
    outputs : array, shape (C_out, F)
        Statistics of the layer's output after norm and activation.
    """

    inputs: NDArray[np.float64]
    outputs: NDArray[np.float64]


class SummaryScore(ChannelScore):
    """A channel score that only sees the summary of a set: the extension point for learned selectors.

    `fl_elastic.testing.channel_score_checks` tests it like any other channel score.

    Attributes
    ----------
    examples : int
        Largest number of examples of the probe's batch that are passed through the model.
    """

    batches_needed = 1
    examples: int = _EXAMPLES

    @abstractmethod
    def select(self, summary: Mapping[str, LayerSummary]) -> dict[str, ChannelScores]:
        """Return channel scores of the layers that ``summary`` describes, by group name."""

    def score(self, probe: Probe, graph: BackwardGraph) -> dict[str, ChannelScores]:
        """Return the scores by group name after one forward pass; raise TrainingError if they are not finite."""
        return self.select(summarise(probe, graph, self.examples))


def summarise(
    probe: Probe, graph: BackwardGraph, examples: int = _EXAMPLES
) -> dict[str, LayerSummary]:
    """Return the summary of the first examples of a probe's first batch, by group name.

    The examples are passed forward once, without gradients, with norms and dropout in eval mode; the probe is left
    unchanged.

    Raises
    ------
    TrainingError
        If an activation is not finite.
    """
    layers = scored_layers(probe.model, probe.groups, graph)
    with norms_at_rest(probe.model, probe.groups), torch.no_grad():
        for module in probe.model.modules():
            if isinstance(module, _DROPOUTS):
                module.training = False
        batch, count = next(micro_batches(probe.model, probe.batches, examples))
        pooled = _Pooled(count=count)
        with pooled.listening(probe.model, layers):
            call_model(probe.model, as_pair(batch)[0], batch_size(batch))
    classes = _classes(batch)
    order = {group.name: place for place, group in enumerate(graph.groups)}
    found = {}
    for layer in layers:
        name = layer.group.name
        depth = order.get(name, 0) / max(len(order) - 1, 1)
        sides = [
            _side(layer, [pooled.seen[key] for key in keys[name]], classes, depth, axis)
            for axis, keys in enumerate((pooled.entering, pooled.leaving))
        ]
        if not all(np.isfinite(side).all() for side in sides):
            raise TrainingError(
                f"activations of {name!r} are not finite: check the probe batch for NaN and the learning rate"
            )
        found[name] = LayerSummary(*sides)
    return found


@dataclass(frozen=True, eq=False)
class _Seen:
    """Activations of one use of a layer, averaged over positions: shapes (n, channels) and (channels,)."""

    mean: Columns
    square: Columns
    positions: int


@dataclass
class _Pooled(Taps):
    """Keeps averages of the tensors at the layers, but no tensor of a forward pass."""

    count: int = 1
    seen: dict[Key, _Seen] = field(default_factory=dict)

    def take(self, layer: Layer, tensor: Tensor) -> Key:
        """Average a tensor over positions; if its rows are not examples, the tensor counts as one example."""
        value = tensor.detach().float()
        if layer.channel_dimension == -1 or value.dim() != 4 or len(value) != self.count:
            value = value.movedim(layer.channel_dimension, -1)
            channels = value.shape[-1]
            rows = self.count if len(value) and value.numel() % (self.count * channels) == 0 else 1
            value = value.reshape(rows, -1, channels).movedim(-1, 1)
        value = value.flatten(2)
        positions = value.shape[2]
        # A vector norm takes up to twenty times as long if channels come last in memory.
        squares = value.square().mean(2).double().mean(0)
        key = (len(self.seen), 0)
        self.seen[key] = _Seen(
            value.mean(2).cpu().numpy(),
            squares.cpu().numpy(),
            positions,
        )
        return key


def _side(
    layer: Layer, uses: Sequence[_Seen], classes: Columns | None, depth: float, axis: int
) -> Columns:
    """Return the rows for the input (axis 0) or output (1) of a layer."""
    channels = layer.out_channels if axis else layer.in_channels
    fitting = [use for use in uses if use.mean.shape[1] == channels]
    numbers = np.zeros((channels, len(FEATURES)))
    logs = {"weight": _log(_weights(layer, axis))}
    if fitting:
        mean: Columns = np.stack([use.mean for use in fitting]).mean(0, dtype=np.float64)
        logs["mean"] = _log(np.abs(mean.mean(0)))
        logs["spread"] = _log(mean.std(0))
        logs["energy"] = _log(np.sqrt(np.mean([use.square for use in fitting], 0)))
        numbers[:, _PLACES["between"]] = _between(mean, classes)
        numbers[:, _PLACES["positions"]] = np.log10(fitting[0].positions)
    for name, values in logs.items():
        centre = values.mean()
        numbers[:, _PLACES[name]] = values - centre
        if name in _OF_LAYER:
            numbers[:, _PLACES[f"layer_{name}"]] = centre
    weight = layer.module.weight
    depthwise = isinstance(layer.module, nn.Conv2d) and layer.module.groups == len(weight) > 1
    for name, value in (
        ("depth", depth), ("channels", np.log10(channels)), ("outputs", axis), ("depthwise", depthwise),
        ("fan_in", np.log10(weight[0].numel())), ("linear", isinstance(layer.module, nn.Linear)),
    ):  # fmt: skip
        numbers[:, _PLACES[name]] = value
    return numbers


def _weights(layer: Layer, axis: int) -> Columns:
    """Return the norm of each channel's weights."""
    weight = layer.module.weight.detach().float()
    groups = 1 if isinstance(layer.module, nn.Linear) else layer.module.groups
    parts = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)
    squares = parts.square().sum(3).double().sum(2 if axis else 1)
    found: Columns = squares.flatten().sqrt().cpu().numpy()
    return found


def _log(values: Columns) -> Columns:
    found: Columns = np.log10(values + _TINY)
    return found


def _between(mean: Columns, classes: Columns | None) -> Columns:
    """Return the share of the variance over examples that lies between classes."""
    if classes is None or len(mean) % len(classes):
        return np.zeros(mean.shape[1])
    # There may be several inputs per target, as with prototypes.
    own = np.tile(classes, (len(mean) // len(classes), 1))
    counts = own.sum(0)
    apart = own.T @ mean / counts[:, None] - mean.mean(0)
    shares: Columns = (counts @ apart**2) / len(mean) / (mean.var(0) + _TINY**2)
    return shares.clip(0, 1)


def _classes(batch: Batch) -> Columns | None:
    """Return a one-hot matrix of classes, shape (n, classes); None if targets are no classes."""
    targets: Any = as_pair(batch)[1]
    whole = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
    if not whole or not len(targets):
        return None
    values = targets.cpu().numpy()
    found: Columns = (values[:, None] == np.unique(values)).astype(np.float64)
    return found
