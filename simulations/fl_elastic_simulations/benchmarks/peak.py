"""The most memory that steps of a plan take, measured in a process of their own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fl_elastic.errors import TrainingError
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.planning import Plan

__all__ = ["ALLOCATOR", "Job", "Peak", "peak_of"]

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment in which larger blocks go back to the system when they are freed, so that the resident set is what is
in use."""


@dataclass(frozen=True)
class Job:
    """What to train: a model that can be named, the shape of a batch, and a plan with its graph."""

    model: str
    classes: int
    batch_shape: tuple[int, ...]
    plan: Plan
    graph: BackwardGraph


@dataclass(frozen=True)
class Peak:
    """The most resident bytes of two steps above those before, and whether the peak could be set back."""

    bytes: int
    reset: bool


def peak_of(job: Job) -> Peak:
    """Run ``job`` in a fresh process with one thread, see `fl_elastic_simulations.benchmarks.one_step`.

    Raises
    ------
    TrainingError
        If that process fails; the message is its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job"
        path.write_bytes(pickle.dumps(job))
        ended = subprocess.run(
            [sys.executable, "-m", "fl_elastic_simulations.benchmarks.one_step", str(path)],
            env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrainingError(f"the process that measures a step ended with {last!r}")
    size, reset = ended.stdout.split()
    return Peak(int(size), reset == "reset")
