"""Take steps on windows of channels: draw them, train in them, remember what they held."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.groups import Batch
from fl_elastic.groups.batch_size import batch_size
from fl_elastic.groups.forward import call_model, split_batch
from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.ops.proven_widths import prove_widths
from fl_elastic.ops.windowed import Narrow, windowed
from fl_elastic.planning.windows import Windows
from fl_elastic.training.narrow_optimizer import driving

__all__ = ["WindowLog", "WindowSteps", "settle_statistics", "settling_passes"]

# Batches at most of which running statistics are taken anew after steps on windows.
_SETTLING = 8


@dataclass(eq=False)
class WindowLog:
    """What the windows of a fit held, by whatever plan.

    Attributes
    ----------
    held : dict of str to list of array
        For each tensor that was trained in part, by axis which indices some window held.
    batches : deque of batch
        The last ones that steps in windows took.
    """

    held: dict[str, list[NDArray[np.bool_]]] = field(default_factory=dict)
    batches: deque[Batch] = field(default_factory=lambda: deque(maxlen=_SETTLING))


class WindowSteps:
    """Opens a window for each step of a plan.

    Parameters
    ----------
    model : nn.Module
        Trained in place.
    windows : Windows
        Of the plan.
    log : WindowLog
        Of the fit; written.
    """

    def __init__(self, model: nn.Module, windows: Windows, log: WindowLog) -> None:
        self._model, self._windows, self._log = model, windows, log
        self._names = {id(each): name for name, each in model.named_parameters()}
        self._step = 0

    @contextmanager
    def step(self, optimizer: torch.optim.Optimizer, batch: Batch) -> Iterator[list[Narrow]]:
        """Let model and optimiser consist of this step's windows inside the block.

        Raises
        ------
        PlanError
            If something outside of the layers of a width sees its channels, which the first step finds out.
        """
        prove_widths(self._model, self._windows.widths, batch)
        starts = self._windows.starts(self._step)
        kept = {w: (starts[w.name], self._windows.length(w)) for w in self._windows.widths}
        self._step += 1
        self._log.batches.append(batch)
        with windowed(self._model, kept) as narrow, driving(optimizer, narrow):
            yield narrow
        self._remember(narrow)

    def _remember(self, narrow: list[Narrow]) -> None:
        for each in narrow:
            shape = tuple(each.whole.shape)
            masks = self._log.held.setdefault(
                self._names[id(each.whole)], [np.zeros(n, dtype=bool) for n in shape]
            )
            windowed_axes = {span.axis: span for span in each.window.spans}
            for axis, mask in enumerate(masks):
                span = windowed_axes.get(axis)
                for first, count in (
                    [(0, shape[axis])] if span is None else span.pieces(shape[axis])
                ):
                    mask[first : first + count] = True


def settling_passes(model: nn.Module, requested_steps: int) -> int:
    """Return how many forward passes a fit of so many steps spends on running statistics: none without any."""
    if not _training_norms(model):
        return 0
    return min(_SETTLING, 1 + requested_steps // _SETTLING)


@torch.no_grad()
def settle_statistics(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Replace the running statistics of batch norms that train by their means over some batches."""
    norms = _training_norms(model)
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    try:
        for count, batch in enumerate(batches, start=1):
            for norm in norms:
                norm.momentum = 1 / count
            call_model(model, split_batch(batch)[0], batch_size(batch))
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def _training_norms(model: nn.Module) -> list[BatchNorm]:
    return [
        each
        for each in model.modules()
        if isinstance(each, BatchNorm) and each.training and each.track_running_stats
    ]
