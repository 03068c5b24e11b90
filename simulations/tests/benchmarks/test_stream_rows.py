"""The benchmark of streams: a small stream through every method, and tables of made-up rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic_simulations.benchmarks import stream_cell as cell
from fl_elastic_simulations.benchmarks.stream import BENCHMARK
from fl_elastic_simulations.benchmarks.stream_methods import LATENT, METHODS, READS, REFERENCE
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS, Labelled, Stream


def clouds(_: Path, seed: int) -> Stream:
    """Two clouds of points, known; then two more somewhere else."""
    draw = np.random.default_rng(seed)
    centres = np.array([[3, 0], [-3, 0], [0, 3], [0, -3]])

    def some(labels: list[int], size: int) -> Labelled:
        y = draw.choice(labels, size)
        x = (centres[y] + 0.3 * draw.normal(size=(size, 2))).astype(np.float32)
        return Labelled(x, y.astype(np.int64))

    first, second = some([0, 1], 150), some([2, 3], 150)
    samples = Labelled(np.concatenate([first.x, second.x]), np.concatenate([first.y, second.y]))
    tests = (some([0, 1], 60), some([2, 3], 60))
    return Stream(some([0, 1], 100), samples, (0, 150), tests)


def dense(_: Path, outputs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lower = [nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
        return nn.Sequential(*lower, nn.Linear(16, outputs))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    task = replace(
        TASKS["electricity"], title="Clouds", read=clouds, build=dense, every=30, steps=20,
        latent_steps=20, together=10, rate=0.01, epochs=60,
    )  # fmt: skip
    monkeypatch.setitem(TASKS, "clouds", task)
    yield "clouds"
    cell._at_home.cache_clear()


@pytest.mark.slow
def test_replay_learns_what_is_new_and_keeps_what_was(small: str) -> None:
    rows = {
        method: cell.run_stream(small, method, 0, None)
        for method, how in METHODS.items()
        if TASKS[small].has(how.read)
    }
    still = rows["no adaptation"]
    assert still["average"] == pytest.approx(0.5, abs=0.05)
    assert still["adaptations"] == 0
    assert still["adapting_seconds"] == 0
    assert rows[REFERENCE]["average"] > 0.95
    assert rows[REFERENCE]["forgetting"] < 0.05
    assert rows["full, no replay"]["forgetting"] > rows[REFERENCE]["forgetting"]
    assert rows[LATENT]["average"] > 0.8
    assert rows[READS]["average"] > 0.9 and "@" in rows[READS]["reads"]
    assert rows[READS]["adapting_seconds"] > rows[READS]["choosing_seconds"] > 0
    for row in rows.values():
        assert row["samples"] == 300
        assert row["store_bytes"] <= TASKS[small].capacity
    assert rows[LATENT]["store_bytes"] <= TASKS[small].capacity / 10


def row(average: float, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "average": average, "forgetting": 0.1, "prequential": 0.6, "recovery": 40.0,
        "adapting_seconds": seconds, "peak_bytes": 10**6, "store_bytes": 1000, **more,
    }  # fmt: skip


def test_a_table_counts_seeds_that_the_reference_has_too() -> None:
    rows = {
        f"electricity | {REFERENCE} | 0": row(0.8, 8.0),
        f"electricity | {REFERENCE} | 1": row(0.6, 4.0),
        f"electricity | {LATENT} | 0": row(0.7, 2.0, recovery=None),
        f"electricity | {LATENT} | 1": row(0.6, 1.0),
        f"electricity | {LATENT} | 2": row(0.1, 9.0),
    }
    table = BENCHMARK.tables(rows)["electricity"]
    assert table.index.name == TASKS["electricity"].title
    # Student's t with one degree of freedom: 12.706 * sd / sqrt(2), sd = 0.1 / sqrt(2).
    assert table.loc[LATENT].tolist() == [
        "65.0 ± 63.5", "-5.0 ± 63.5", "10.0", "40", "1.5", "1.00 MB", "1.00 kB",
    ]  # fmt: skip
    assert table.loc[REFERENCE, "against"] == "+0.0"
    without = BENCHMARK.tables({f"electricity | {REFERENCE} | 0": row(0.8, 8.0, recovery=None)})
    assert without["electricity"].loc[REFERENCE, "recovery"] == "\N{EN DASH}"


def test_over_tasks_and_drifts_by_hand() -> None:
    # Three tasks; the row says after which one, the column on which one.
    found = cell._over_tasks([[0.9, 0.1, 0.1], [0.6, 0.8, 0.2], [0.5, 0.7, 0.9]])
    # ((0.9 - 0.5) + (0.8 - 0.7)) / 2
    assert found == {"average": pytest.approx(0.7), "forgetting": pytest.approx(0.25)}
    assert cell._over_tasks([[]]) == {}
    assert cell.recovery(np.array([0.8, 0.8, 0.8, 0.79]), 2) == 0
    assert cell.recovery(np.array([0.8, 0.8, 0.8, 0.5, 0.5]), 2) == 3
    correct = np.array([True] * 100 + [False] * 40 + [True] * 400)
    assert 40 < cell._mean_recovery(correct, [100]) < 300
    assert cell._mean_recovery(correct, []) is None
