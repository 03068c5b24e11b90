"""Narrow models inside wide ones: each client trains as many channels as it can afford."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import batch_shape, to_device
from fl_elastic.planning.windows import window_starts
from fl_elastic.profiling import profile_model
from fl_elastic.profiling.optimizers import OptimizerFn
from fl_elastic.profiling.profile_key import model_device
from fl_elastic.training.changes import changes
from fl_elastic.training.frozen import training_statistics
from fl_elastic.update import Manifest, load_weights, weights_of
from fl_elastic.update.parts import Masks, outer_mask
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    Peer,
    first_batch,
    register_peer,
    requested_steps,
    steps_in_time,
    task_generator,
)
from fl_elastic_simulations.peers.narrow import (
    Kept,
    kept_entries,
    narrow_model,
    part_of_axes,
    spread,
)
from fl_elastic_simulations.peers.training import put_back_on_error, take_steps
from fl_elastic_simulations.peers.widths import LayerChannels, Starts, channels_of

__all__ = [
    "RATES",
    "HeteroFl",
    "affordable_rate",
    "labels_present",
    "masked_loss",
    "narrow_seconds",
]

RATES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)

_Array: TypeAlias = NDArray[Any]
_Present: TypeAlias = NDArray[np.bool_]
# A model's text holds its classes and sizes, which decide what is remembered here.
_LAYERS: dict[tuple[str, tuple[int, ...]], tuple[LayerChannels, ...]] = {}
_SECONDS: dict[tuple[str, float, tuple[int, ...]], float] = {}


@register_peer("heterofl")
@register_peer("fedrolex", windows="rolling")
@register_peer("random_windows", windows="random")
class HeteroFl(Peer):
    """Train a window of the channels of every layer, as many as fit the time.

    HeteroFL (Diao et al., ICLR 2021). From the paper: nested widths 1, 1/2, ..., 1/16 with inputs and class scores
    whole; the scaler, which divides by the rate behind each inner layer in training; static batch norm, which uses
    the statistics of the batch and keeps none; masked cross-entropy, which sets the scores of classes absent from
    the client's data to zero; averages per element over those who hold it, each client alike, and of the output
    layer only over those who have the class (published code). Assumed: where a task gives no width, the rate
    follows from the round's allowed time and the measured cost of each width; a group norm keeps as many groups as
    divide its channels; clients of rate 1 keep running statistics as usual and send them, in place of the paper's
    extra pass over all data. Where not even the narrowest fits, it takes fewer steps.

    Parameters
    ----------
    name : str
        As registered.
    windows : {"first", "rolling", "random"}
        Where windows begin: at the first channel as in HeteroFL; one channel further in each round, and on at the
        first after the last, so that all are trained equally often, as in FedRolex (Alam et al., NeurIPS 2022);
        or where seed, client and round draw it, federated dropout (Caldas et al., 2018) of neighbouring channels.
    """

    rule = "contributors"
    weighting = "uniform"

    def __init__(self, name: str, windows: Literal["first", "rolling", "random"] = "first") -> None:
        super().__init__(name)
        self.windows = windows

    def local_training(self, task: LocalTask) -> LocalResult:
        """Choose a width and train it."""
        wide = task.model
        first = to_device(first_batch(task), model_device(wide))
        if not isinstance(first[0], Tensor):
            raise ModelError(f"heterofl takes one tensor as input, not {type(first[0]).__name__}")
        layers = _layers_of(wide, first[0])
        rate, seconds = affordable_rate(task, layers, first)
        steps = steps_in_time(task, seconds)
        present = labels_present(task.batches, layers)
        manifest = Manifest.of(wide)
        base = weights_of(wide, manifest)
        starts = self._starts(task, layers)
        model = wide if rate == 1 else narrow_model(wide, layers, rate, starts)
        with put_back_on_error(wide):
            before = weights_of(model, Manifest.of(model))
            taken = take_steps(task, model, masked_loss(task.loss_fn, present), steps)
            names = dict.fromkeys([*taken.trained, *training_statistics(model)], taken.count)
            learnt = changes(model, Manifest.of(model), before, names)
        kept = kept_entries(wide, layers, rate, starts)
        parts = _parts(wide, layers, kept, present, learnt)
        deltas = {
            name: _only(
                spread(delta, manifest.shape(name), kept[name]) if name in kept else delta,
                parts.get(name),
            )
            for name, delta in learnt.items()
        }
        if parts or model is not wide:
            after = {name: base[name] + delta for name, delta in deltas.items()}
            load_weights(wide, manifest, weights_of(wide, manifest) | after)
        return taken.result(task, deltas, seconds, parts=parts)

    def _starts(self, task: LocalTask, layers: Sequence[LayerChannels]) -> Starts:
        """Return where the window of each space of channels begins."""
        if self.windows == "first":
            return {}
        sizes = sorted({each.outputs.space: each.outputs.size for each in layers}.items())
        if self.windows == "rolling":
            return {space: (task.server_round - 1) % size for space, size in sizes}
        generator = task_generator(task)
        return {
            space: int(generator.choice(window_starts(size, 1, "wrap"))) for space, size in sizes
        }


def _layers_of(model: nn.Module, inputs: Tensor) -> tuple[LayerChannels, ...]:
    """Return the channels of the model's layers, traced once per process, model and shape of an input."""
    case = str(model), tuple(inputs.shape[1:])
    if case not in _LAYERS:
        _LAYERS[case] = channels_of(model, inputs)
    return _LAYERS[case]


def affordable_rate(
    task: LocalTask, layers: Sequence[LayerChannels], first: Batch
) -> tuple[float, float]:
    """Return the task's width, or the largest rate whose whole round fits the time, and the seconds of its step.

    The narrowest if none fits. The whole model costs what the task's profile says; narrower ones what the task
    knows, or they are measured once per process, model and batch shape.
    """
    steps, rates = requested_steps(task), RATES if task.width is None else (task.width,)
    seconds = task.profile.full_step_seconds
    for rate in rates:
        if rate < 1:
            known = task.narrow_seconds.get(rate)
            seconds = _narrow_step_seconds(task, layers, rate, first) if known is None else known
        if steps * seconds <= task.allowed_seconds * (1 + 1e-9):
            return rate, seconds
    return rates[-1], seconds


def _narrow_step_seconds(
    task: LocalTask, layers: Sequence[LayerChannels], rate: float, first: Batch
) -> float:
    """Return the measured seconds of a step at this rate, for batches of the profile's size."""
    batch = _of_size(first, task.profile.key.rows)
    case = str(task.model), rate, batch_shape(batch)
    if case not in _SECONDS:
        narrow = narrow_model(task.model, layers, rate)
        profile = profile_model(narrow, task.loss_fn, batch, optimizer_fn=task.optimizer_fn)
        _SECONDS[case] = profile.full_step_seconds
    return _SECONDS[case]


def narrow_seconds(
    model: nn.Module, loss_fn: LossFn, batch: Batch, optimizer_fn: OptimizerFn
) -> dict[float, float]:
    """Return the measured seconds of a step at each rate below 1, by the time of this thread."""
    layers = _layers_of(model, batch[0])
    return {
        rate: profile_model(
            narrow_model(model, layers, rate),
            loss_fn,
            batch,
            optimizer_fn=optimizer_fn,
            clock="cpu",
        ).full_step_seconds
        for rate in RATES
        if rate < 1
    }


def _of_size(batch: Batch, size: int) -> Batch:
    """Return a batch of this many examples: a client's first batch may be smaller than the profile's."""
    if len(batch[0]) == size:
        return batch
    rows = torch.arange(size, device=batch[0].device) % len(batch[0])
    return batch[0][rows], batch[1][rows]


def labels_present(batches: Iterable[Batch], layers: Sequence[LayerChannels]) -> _Present | None:
    """Return which classes the data holds, shape (classes,); None if targets are no class indices.

    Parameters
    ----------
    batches : iterable of batch
        The client's data.
    layers : sequence of LayerChannels
        Of the model, to know the number of classes.
    """
    classes = next((layer.outputs.size for layer in layers if layer.is_output), 0)
    present = np.zeros(classes, dtype=bool)
    for _, targets in batches:
        if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
            return None
        if not classes or not 0 <= int(targets.min()) <= int(targets.max()) < classes:
            return None
        present[torch.unique(targets).cpu().numpy()] = True
    return present


def masked_loss(loss_fn: LossFn, present: _Present | None) -> LossFn:
    """Return ``loss_fn`` with the scores of absent classes set to zero; as it is if all are present.

    Examples
    --------
    >>> loss = masked_loss(nn.functional.cross_entropy, np.array([True, False]))
    >>> round(loss(torch.tensor([[0.0, 5.0]]), torch.tensor([0])).item(), 4)
    0.6931
    """
    if present is None or present.all():
        return loss_fn
    return partial(_loss_without, loss_fn, torch.as_tensor(~present))


def _loss_without(loss_fn: LossFn, absent: Tensor, outputs: Tensor, targets: Any) -> Tensor:
    return loss_fn(outputs.masked_fill(absent.to(outputs.device), 0.0), targets)


def _parts(
    model: nn.Module,
    layers: Sequence[LayerChannels],
    kept: Kept,
    present: _Present | None,
    names: Iterable[str],
) -> dict[str, Masks]:
    """Return the trained part of every tensor that is not trained as a whole."""
    outputs = {layer.module for layer in layers if layer.is_output}
    parts = {}
    for name in names:
        if name not in kept:
            continue
        known = present is not None and name.rpartition(".")[0] in outputs
        rows = {0: present} if known and present is not None else {}
        part = part_of_axes(tuple(model.get_parameter(name).shape), kept[name], rows)
        if any(mask is not None for mask in part):
            parts[name] = part
    return parts


def _only(delta: _Array, part: Masks | None) -> _Array:
    """Return the delta with zeros outside of the trained part: weight decay also moves what nobody trains."""
    trained = None if part is None else outer_mask(part)
    return delta if trained is None else delta * trained
