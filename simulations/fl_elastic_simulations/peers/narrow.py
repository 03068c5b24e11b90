"""Cut the narrow model out of a wide one: a window of the channels of every inner tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import gcd
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.update.parts import Masks
from fl_elastic_simulations.peers.widths import CONVOLUTIONS, LayerChannels, Starts

__all__ = ["Kept", "kept_entries", "narrow_model", "part_of_axes", "spread"]

_Entries: TypeAlias = NDArray[np.int64]
Kept: TypeAlias = dict[str, tuple[_Entries, ...]]


def narrow_model(
    model: nn.Module,
    layers: Sequence[LayerChannels],
    rate: float,
    starts: Starts | None = None,
    *,
    scaled: bool = True,
) -> nn.Module:
    """Return a copy of ``model`` with a window of the channels of every layer: the first ones, or from a start on.

    A group norm keeps as many groups as divide its channels. A batch norm uses the statistics of the batch and
    keeps none.

    Parameters
    ----------
    model : nn.Module
        The wide model.
    layers : sequence of LayerChannels
        Of the wide model.
    rate : float
        Share of the channels, rounded up.
    starts : mapping of int to int, optional
        Where the window of each space begins.
    scaled : bool
        Whether each inner convolution and linear layer divides by ``rate`` while training, so that sums over fewer
        channels are as large as in the wide model (HeteroFL's scaler).

    Examples
    --------
    >>> from fl_elastic_simulations.peers.widths import channels_of
    >>> wide = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> narrow_model(wide, channels_of(wide, torch.zeros(1, 6)), 0.25)[2]
    Linear(in_features=2, out_features=3, bias=True)
    """
    narrow = deepcopy(model)
    kept = kept_entries(model, layers, rate, starts)
    for layer in layers:
        module: Any = narrow.get_submodule(layer.module)
        for name, parameter in module.named_parameters(recurse=False):
            cut = parameter.detach()
            for axis, entries in enumerate(
                kept[f"{layer.module}.{name}" if layer.module else name]
            ):
                places = torch.as_tensor(entries, device=cut.device)
                cut = cut if len(entries) == cut.shape[axis] else cut.index_select(axis, places)
            setattr(module, name, nn.Parameter(cut.clone(), requires_grad=parameter.requires_grad))
        _tell(module, layer, rate)
        if scaled and layer.inputs is not None and not layer.outputs.fixed:
            module.register_forward_hook(_Scaler(rate))
    for module in narrow.modules():
        if isinstance(module, BatchNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return narrow


def _tell(module: Any, layer: LayerChannels, rate: float) -> None:
    """Set the sizes that a layer remembers besides its tensors."""
    outputs = layer.outputs.kept(rate)
    inputs = outputs if layer.inputs is None else layer.inputs.kept(rate)
    if isinstance(module, CONVOLUTIONS):
        module.in_channels, module.out_channels = inputs, outputs
        module.groups = outputs if layer.inputs is None else 1
    elif isinstance(module, nn.Linear):
        module.in_features, module.out_features = inputs, outputs
    elif isinstance(module, nn.GroupNorm):
        module.num_channels, module.num_groups = outputs, gcd(module.num_groups, outputs)
    else:
        module.num_features = outputs


class _Scaler:
    """Divides what a layer puts out by the rate, in training only."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def __call__(self, module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        del inputs
        return outputs / self._rate if module.training else outputs


def kept_entries(
    model: nn.Module, layers: Sequence[LayerChannels], rate: float, starts: Starts | None = None
) -> Kept:
    """Return, per parameter of the layers and axis, the entries that a model of this rate keeps.

    Parameters outside of the layers are left out. Axes that are kept whole are in their own order.
    """
    kept: Kept = {}
    for layer in layers:
        module = model.get_submodule(layer.module)
        for name, parameter in module.named_parameters(recurse=False):
            entries = [np.arange(length) for length in parameter.shape]
            ends = [layer.outputs, layer.inputs][: len(entries)]
            for axis, channels in enumerate(ends):
                if channels is not None and channels.kept(rate) < len(entries[axis]):
                    entries[axis] = channels.entries(rate, starts or {})
            kept[f"{layer.module}.{name}" if layer.module else name] = tuple(entries)
    return kept


def spread(small: NDArray[Any], shape: Sequence[int], entries: Sequence[_Entries]) -> NDArray[Any]:
    """Return an array of this shape with ``small`` at these entries of its axes and zeros elsewhere.

    >>> spread(np.array([[1.0, 2.0]]), (2, 3), (np.array([1]), np.array([2, 0]))).tolist()
    [[0.0, 0.0, 0.0], [2.0, 0.0, 1.0]]
    """
    wide = np.zeros(shape, dtype=small.dtype)
    wide[np.ix_(*entries)] = small
    return wide


def part_of_axes(
    shape: Sequence[int], kept: Sequence[_Entries], rows: Mapping[int, NDArray[np.bool_]]
) -> Masks:
    """Return one mask per axis: the kept entries, of them the given rows; None for a whole axis.

    >>> part_of_axes((2, 3), (np.arange(2), np.array([2])), {})
    (None, array([False, False,  True]))
    """
    masks: list[NDArray[np.bool_] | None] = []
    for axis, (length, entries) in enumerate(zip(shape, kept, strict=True)):
        mask = np.isin(np.arange(length), entries) & rows.get(axis, np.True_)
        masks.append(None if mask.all() else mask)
    return tuple(masks)
