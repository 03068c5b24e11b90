"""A device that learns for very long: a million samples of motion sensors, with the store at its bound."""

from __future__ import annotations

import mmap
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.budget import Budget
from fl_elastic.named_models import build_model
from fl_elastic.streaming import EverySamples, OnDrift, SampleStore, StreamLearner
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.data.datasets import load_dataset

__all__ = ["CAPACITY", "EVERY", "ROW", "SAMPLES", "Windows", "bench_soak", "person_after_person"]

SAMPLES = 1_000_000
ROW = 50_000
"""Samples of one row."""
CAPACITY = 8 * 2**20
"""Bytes of the store."""
EVERY = 5_000
"""Samples between adaptations."""
_BATCH = 50
_NOISE = 0.05
_SEED = 0


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of motion sensors that are repeated for ever, each time with other noise.

    Parameters
    ----------
    x : array of float32, shape (N, channels, samples)
        One person after the other, each in time order.
    y : array of int64, shape (N,)
        Activities.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]

    def batch(self, start: int, size: int) -> tuple[NDArray[np.float32], list[int]]:
        """Return samples from the start-th on: the same ones each time they are asked for."""
        rows = np.arange(start, start + size) % len(self.x)
        noise = np.random.default_rng((_SEED, start)).standard_normal(
            (size, *self.x.shape[1:]), np.float32
        )
        return self.x[rows] + np.float32(_NOISE) * noise, self.y[rows].tolist()


def person_after_person(data_root: str | Path | None = None) -> Windows:
    """Return all windows of the sensor set for training, sorted by person."""
    data = load_dataset("har", data_root)
    assert data.owners is not None
    order = np.argsort(data.owners, kind="stable")
    return Windows(data.train_x[order].astype(np.float32), data.train_y[order].astype(np.int64))


def bench_soak(
    results: Results,
    data_root: str | Path | None = None,
    *,
    samples: int = SAMPLES,
    windows: Windows | None = None,
    every_row: int = ROW,
    tell: Callable[[str], None] = print,
) -> None:
    """Stream so many samples through a learner, one thread, and add a row for each part of the stream.

    The learner's state lies beside the table, so that a run that was interrupted goes on where it was saved; the
    first row then counts what came after that. Samples are handed over by fifties, as a sensor's buffer would.
    """
    folder = results.path.with_suffix(".state")
    wanted = [_name(at) for at in range(every_row, samples + 1, every_row)]
    if all(name in results.rows for name in wanted):
        return
    if not any(name in results.rows for name in wanted):
        shutil.rmtree(folder, ignore_errors=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source = windows or person_after_person(data_root)
    try:
        for name, row in _rows(folder, source, samples, every_row):
            results.add(name, row)
            tell(
                f"{name}: {row['samples_per_second']:.0f}/s, {row['resident_bytes'] / 2**20:.0f} MiB"
            )
    finally:
        torch.set_num_threads(threads)
    results.add("whole", _whole([results.rows[name] for name in wanted if name in results.rows]))
    shutil.rmtree(folder, ignore_errors=True)


def _rows(
    folder: Path, source: Windows, samples: int, every_row: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    model = build_model("har_cnn", source.x.shape[1:], int(source.y.max()) + 1, _SEED)
    with (
        SampleStore(folder / "samples.db", CAPACITY, policy="class_balanced", seed=_SEED) as store,
        StreamLearner(
            model, store, budget=Budget(speedup=2), policy="elastic",
            optimizer_fn=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
            trigger=EverySamples(EVERY) | OnDrift(200), detector="adwin", state_dir=folder, seed=_SEED,
        ) as learner,
    ):  # fmt: skip
        part = _Part(learner)
        while (at := learner.progress.observed) < samples:
            # Batches do not reach over the end of a row, wherever an interrupted run began again.
            size = min(_BATCH - at % _BATCH, every_row - at % every_row)
            learner.observe_batch(*source.batch(at, size))
            part.look()
            if learner.progress.observed % every_row == 0:
                yield _name(learner.progress.observed), part.row()
                part = _Part(learner)


class _Part:
    """A part of the stream as it is measured."""

    def __init__(self, learner: StreamLearner) -> None:
        self._learner, progress = learner, learner.progress
        self._began = (progress.observed, progress.right, progress.labelled, progress.drifts)
        self._adaptations = progress.adaptations, progress.rolled_back
        self._clocks = time.perf_counter(), time.process_time()
        self._most_bytes = 0

    def look(self) -> None:
        """Note what the store takes now."""
        self._most_bytes = max(self._most_bytes, self._learner.store.used_bytes)

    def row(self) -> dict[str, Any]:
        """Return what was measured."""
        learner, progress = self._learner, self._learner.progress
        observed, right, labelled, drifts = self._began
        seconds = time.perf_counter() - self._clocks[0]
        cpu = time.process_time() - self._clocks[1]
        count = progress.observed - observed
        return {
            "samples": count,
            "seconds": seconds,
            "samples_per_second": count / seconds,
            "samples_per_cpu_second": count / cpu,
            "resident_bytes": resident_bytes(),
            "store_bytes": self._most_bytes,
            "store_bound": learner.store.capacity_bytes,
            "stored": len(learner.store),
            "classes": len(learner.classes),
            "accuracy": (progress.right - right) / max(progress.labelled - labelled, 1),
            "drifts": progress.drifts - drifts,
            "adaptations": progress.adaptations - self._adaptations[0],
            "rolled_back": progress.rolled_back - self._adaptations[1],
            "refused": sum(progress.rejected.values()) + sum(learner.store.rejected.values()),
        }


def resident_bytes() -> int:
    """Return what this process holds in memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * mmap.PAGESIZE


def _whole(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the rows together say: the extremes that must not drift apart."""
    rates = [row["samples_per_cpu_second"] for row in rows]
    # While the store fills and classes come, memory grows as it should.
    settled = [row["resident_bytes"] for row in rows[1:] or rows]
    return {
        "samples": sum(row["samples"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "slowest_per_cpu_second": min(rates),
        "fastest_per_cpu_second": max(rates),
        "least_resident_bytes": min(settled),
        "most_resident_bytes": max(settled),
        "store_bytes": max(row["store_bytes"] for row in rows),
        "store_bound": rows[-1]["store_bound"],
        "accuracy": sum(row["accuracy"] * row["samples"] for row in rows)
        / sum(row["samples"] for row in rows),
        "refused": rows[-1]["refused"],
    }


def _name(at: int) -> str:
    return f"{at:>9,} samples".strip()
