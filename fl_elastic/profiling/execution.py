"""The fastest way to run a step on a device: threads and memory format, chosen by measurement."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fl_elastic.errors import ArchiveError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.batch import as_pair
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.untouched import untouched
from fl_elastic.state.archive import Kind
from fl_elastic.state.codec import read_state, write_state

_KIND = Kind("fl_elastic.execution", 2)
_WARM_UP = 1
_STEPS = 5
_GAIN = 0.95


@dataclass(frozen=True)
class Execution:
    """Settings of a training process.

    Parameters
    ----------
    threads : int
        Number of torch threads.
    channels_last : bool
        Whether weights and images are stored channels last, which is often faster for convolutions on CPUs.
    """

    threads: int
    channels_last: bool = False

    def apply(self, model: nn.Module) -> None:
        """Apply the settings to the process and the model; inputs follow the weights' format automatically."""
        torch.set_num_threads(self.threads)
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        model.to(memory_format=form)


@dataclass(frozen=True)
class _Measured:
    case: str
    fastest: Execution


def measure_execution(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    most_threads: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Execution:
    """Return the fastest of several settings for a whole training step.

    Thread counts are the powers of two up to ``most_threads``, and that number itself; the memory format is then
    tried at the best of them. A setting is only preferred to a simpler one if it is at least 5 % faster. Model and
    process are left unchanged.

    Parameters
    ----------
    model, loss_fn, batch
        The model, loss and batch of the training.
    most_threads : int
        Number of threads that can run at the same time.
    clock : callable
        Returns the elapsed time in seconds.
    """
    before = torch.get_num_threads()
    candidates = sorted({2**power for power in range(most_threads.bit_length())} | {most_threads})
    best, best_seconds = Execution(1), float("inf")
    try:
        with untouched(model, loss_fn):
            for threads in candidates:
                tried = Execution(threads)
                seconds = _step_seconds(tried, model, loss_fn, batch, clock)
                if seconds < _GAIN * best_seconds:
                    best, best_seconds = tried, seconds
            inputs = as_pair(batch)[0]
            if isinstance(inputs, torch.Tensor) and inputs.dim() == 4:
                tried = Execution(best.threads, channels_last=True)
                if _step_seconds(tried, model, loss_fn, batch, clock) < _GAIN * best_seconds:
                    best = tried
    finally:
        Execution(before).apply(model)
    return best


def _step_seconds(
    execution: Execution,
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    clock: Callable[[], float],
) -> float:
    execution.apply(model)
    seconds = []
    for _ in range(_WARM_UP + _STEPS):
        started = clock()
        loss = compute_loss(model, loss_fn, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        seconds.append(clock() - started)
    return statistics.median(seconds[_WARM_UP:])


def load_or_measure_execution(
    path: str | os.PathLike[str], case: str, measure: Callable[[], Execution]
) -> Execution:
    """Return the settings kept in a file for this case; if there are none, measure and keep them.

    Parameters
    ----------
    path : path-like
        The file. A damaged file is replaced; if it cannot be written, the next process measures again.
    case : str
        What the settings are valid for: model, batch, number of processors.
    measure : callable
        Measures the settings.
    """
    file = Path(path)
    try:
        kept = read_state(_Measured, file, _KIND)
        if kept.case == case:
            return kept.fastest
    except (OSError, ArchiveError):
        pass
    found = measure()
    try:
        write_state(file, _KIND, _Measured(case, found))
    except OSError:
        pass
    return found
