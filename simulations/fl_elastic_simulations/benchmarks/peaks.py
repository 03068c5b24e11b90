"""Run functions in new processes, to measure their peak memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from fl_elastic_simulations.engine.worker_processes import worker_processes

__all__ = ["ALLOCATOR", "in_fresh_process"]

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment in which larger blocks go back to the system when they are freed, so that the resident set is the
memory in use."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an importable function, called in a new process with one thread and `ALLOCATOR`."""
    with patch.dict(os.environ, {**ALLOCATOR, "OMP_NUM_THREADS": "1"}), worker_processes(1) as pool:
        return pool.submit(function, *arguments).result()
