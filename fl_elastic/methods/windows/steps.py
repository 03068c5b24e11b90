"""Steps on windows of channels: draw windows, apply the optimiser to them, record which indices were trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.batch import as_pair, batch_size
from fl_elastic.groups.forward import call_model
from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.methods.windows.proven_widths import prove_widths
from fl_elastic.methods.windows.windowed import Narrow, windowed
from fl_elastic.methods.windows.windows import Windows
from fl_elastic.optimizers import alike

# Largest number of batches on which running statistics are recomputed after steps on windows.
_MOST_PASSES = 8


class WindowSteps:
    """Opens a window for each step of a plan.

    Parameters
    ----------
    model : nn.Module
        Trained in place.
    windows : Windows
        Windows of the plan.
    before : WindowSteps, optional
        Steps of an earlier plan of the same fit, whose records are continued.

    Attributes
    ----------
    held : mapping of str to list of array
        For each tensor that is trained in part, one mask per axis of the indices that lay in a window of any step.
    """

    def __init__(
        self, model: nn.Module, windows: Windows, before: WindowSteps | None = None
    ) -> None:
        self._model, self._windows = model, windows
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._step = 0
        self._held: dict[str, list[NDArray[np.bool_]]] = {} if before is None else before._held
        self._batches: deque[Batch] = (
            deque(maxlen=_MOST_PASSES) if before is None else before._batches
        )
        self.held: Mapping[str, Sequence[NDArray[np.bool_]]] = self._held

    @contextmanager
    def step(self, optimizer: torch.optim.Optimizer, batch: Batch) -> Iterator[list[Narrow]]:
        """Let model and optimiser work on this step's windows instead of whole tensors inside the context.

        Raises
        ------
        PlanError
            If code outside of a width's layers reads its channels; raised by the first step.
        """
        prove_widths(self._model, self._windows.widths, batch)
        starts = self._windows.starts(self._step)
        kept = {w: (starts[w.name], self._windows.length(w)) for w in self._windows.widths}
        self._step += 1
        self._batches.append(batch)
        with windowed(self._model, kept) as narrow, driving(optimizer, narrow):
            yield narrow
        self._remember(narrow)

    def _remember(self, narrow: list[Narrow]) -> None:
        for each in narrow:
            shape = tuple(each.whole.shape)
            masks = self._held.setdefault(
                self._names[id(each.whole)], [np.zeros(n, dtype=bool) for n in shape]
            )
            windowed_axes = {span.axis: span for span in each.window.spans}
            for axis, mask in enumerate(masks):
                span = windowed_axes.get(axis)
                for first, count in (
                    [(0, shape[axis])] if span is None else span.pieces(shape[axis])
                ):
                    mask[first : first + count] = True

    def close(self, steps: int) -> None:
        """Recompute the running statistics of the whole model on the last batches of a fit of ``steps`` steps."""
        passes, batches = statistics_passes(self._model, steps), list(self._batches)
        if passes and batches:
            retake_statistics(self._model, batches[-passes:])


def statistics_passes(model: nn.Module, steps: int) -> int:
    """Return how many forward passes recompute running statistics after ``steps`` steps; 0 without batch norms."""
    if not _training_norms(model):
        return 0
    return min(_MOST_PASSES, 1 + steps // _MOST_PASSES)


@torch.no_grad()
def retake_statistics(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Replace the running statistics of training batch norms by their means over some batches."""
    norms = _training_norms(model)
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    try:
        for count, batch in enumerate(batches, start=1):
            for norm in norms:
                norm.momentum = 1 / count
            call_model(model, as_pair(batch)[0], batch_size(batch))
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def _training_norms(model: nn.Module) -> list[BatchNorm]:
    return [
        module
        for module in model.modules()
        if isinstance(module, BatchNorm) and module.training and module.track_running_stats
    ]


@contextmanager
def driving(optimizer: torch.optim.Optimizer, narrow: Sequence[Narrow]) -> Iterator[None]:
    """Let the optimiser update the windows instead of the whole parameters inside the context.

    State tensors with the shape of the parameter are cut to windows as well; other state (counts of steps) is that
    of the whole parameter. A step inside equals a step on the whole parameters that leaves the other units and
    their state unchanged. Windows in two pieces are written back at the end.

    Raises
    ------
    TrainingError
        If the optimiser keeps state of another shape, for which no window is known.
    """
    parts = {each.whole: each.part for each in narrow}
    before = [group["params"] for group in optimizer.param_groups]
    states = [optimizer.state.pop(each.whole, None) for each in narrow]
    for group in optimizer.param_groups:
        group["params"] = [parts.get(parameter, parameter) for parameter in group["params"]]
    for each, state in zip(narrow, states, strict=True):
        if state:
            optimizer.state[each.part] = {
                name: each.window.take(value) if _is_whole(value, each.whole) else value
                for name, value in state.items()
            }
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
        learnt = [optimizer.state.pop(each.part, None) for each in narrow]
        for each, state in zip(narrow, states, strict=True):
            if state is not None:
                optimizer.state[each.whole] = state
    with torch.no_grad():
        for each, state, new in zip(narrow, states, learnt, strict=True):
            if not each.window.is_view(each.whole):
                each.window.put(each.whole, each.part)
            if new:
                optimizer.state[each.whole] = _merged(optimizer, each, state or {}, new)


def _is_whole(value: Any, whole: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == whole.shape


def _merged(
    optimizer: torch.optim.Optimizer, each: Narrow, state: dict[str, Any], new: dict[str, Any]
) -> dict[str, Any]:
    """Return the state of the whole parameter, updated with the state of its window."""
    fresh: dict[str, Any] | None = None
    merged: dict[str, Any] = {}
    for name, value in new.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            merged[name] = value
            continue
        if value.shape != each.part.shape:
            raise TrainingError(
                f"{type(optimizer).__name__} keeps {name!r} of shape {tuple(value.shape)} for a weight of "
                f"{tuple(each.part.shape)}, of which no window of channels is known: use an optimiser that keeps "
                "numbers for each weight, such as SGD or Adam, or another policy than 'slice_out'"
            )
        whole: Any = state.get(name)
        if not _is_whole(whole, each.whole):
            fresh = _fresh_state(optimizer, each.whole) if fresh is None else fresh
            whole = fresh[name]
        if not (each.window.is_view(whole) and _shares(whole, each, value)):
            each.window.put(whole, value)
        merged[name] = whole
    return merged


def _shares(whole: Tensor, each: Narrow, value: Tensor) -> bool:
    return each.window.take(whole).data_ptr() == value.data_ptr()


def _fresh_state(optimizer: torch.optim.Optimizer, whole: nn.Parameter) -> dict[str, Any]:
    """Return the state that the optimiser keeps for a zero weight after one zero gradient."""
    weight = nn.Parameter(torch.zeros_like(whole))
    weight.grad = torch.zeros_like(whole)
    other = alike(optimizer, weight)
    other.step()
    return dict(other.state[weight])
