"""The merging benchmark: what is merged is what is claimed, and memory is told per model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_elastic_simulations.benchmarks import aggregation
from fl_elastic_simulations.benchmarks.aggregation import bench_aggregation
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.engine.merging_cost import MERGED, merging_cost


@pytest.mark.parametrize("kind", MERGED)
def test_a_round_of_two_replies_is_merged(kind: str) -> None:
    found = merging_cost(kind, 2)
    assert found["cpu_seconds"] > 0
    assert found["seconds_per_reply"] == found["cpu_seconds"] / 2
    assert found["peak_models"] >= 0


def test_memory_that_says_nothing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    class Here:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def submit(self, _: Any, kind: str, replies: int) -> Here:
            asked.append((kind, replies))
            return self

        def result(self) -> dict[str, float]:
            return {"cpu_seconds": len(asked), "peak_models": 1.0}

    monkeypatch.setattr(aggregation, "ProcessPoolExecutor", Here)
    results = Results(tmp_path / "table.json")
    bench_aggregation(results)
    assert "peak_models" not in results.rows["flower fedavg | 1000"]
    assert "peak_models" in results.rows["flower fedavg | 100"]
    # Three repetitions in turn; the median of the first, fourth and seventh measurement.
    assert asked[:4] == [(kind, 10) for kind in (*MERGED, MERGED[0])]
    assert results.rows["flower fedavg | 10"]["cpu_seconds"] == 4
    count = len(asked)
    bench_aggregation(Results(results.path))
    assert len(asked) == count
