"""Clocks for measuring the time of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from fl_elastic.errors import ProfileError

CLOCKS = ("auto", "wall", "cpu")

Clock: TypeAlias = Callable[[], float]


def _accelerator_clock(device: torch.device) -> float:
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def clock_for(device: torch.device | str, kind: str = "auto") -> Clock:
    """Return a function that returns seconds, suitable for timing training steps on ``device``.

    Parameters
    ----------
    device : torch.device or str
        Where the model trains; on an accelerator the clock waits for queued kernels.
    kind : {"auto", "wall", "cpu"}
        ``wall`` is elapsed time, with the threads that training uses. ``cpu`` is the CPU time of the calling
        thread: the only reliable clock if many clients share a host. It is only valid with one torch thread,
        because the backward pass then runs in the calling thread. ``auto`` chooses ``cpu`` with one torch thread,
        else ``wall``.

    Raises
    ------
    ProfileError
        If ``cpu`` is asked for with several threads, or the kind is unknown.
    """
    if kind not in CLOCKS:
        raise ProfileError(f"clock {kind!r} is unknown: use {', '.join(CLOCKS)}")
    device = torch.device(device)
    if device.type != "cpu":
        # Synchronise the device that the model is on, which need not be the current one.
        return partial(_accelerator_clock, device)
    one_thread = torch.get_num_threads() == 1
    if kind == "cpu" and not one_thread:
        raise ProfileError(
            f"clock 'cpu' needs one torch thread, this process has {torch.get_num_threads()}: "
            "call torch.set_num_threads(1) or use 'wall'"
        )
    return time.thread_time if one_thread and kind != "wall" else time.perf_counter
