"""The most memory that work takes, in processes that nothing ran in before."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fl_elastic_simulations.engine.worker_processes import worker_processes

__all__ = ["ALLOCATOR", "in_fresh_process", "resident_bytes", "set_back_peak"]

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment in which larger blocks go back to the system when they are freed, so that the resident set is what is
in use."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of some module returns in a new process with one thread and `ALLOCATOR`."""
    with patch.dict(os.environ, {**ALLOCATOR, "OMP_NUM_THREADS": "1"}), worker_processes(1) as pool:
        return pool.submit(function, *arguments).result()


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (peak) of this process; the peak from getrusage without /proc."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def set_back_peak() -> bool:
    """Give free memory back and set the peak of the resident set to what is left, where that is permitted."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
