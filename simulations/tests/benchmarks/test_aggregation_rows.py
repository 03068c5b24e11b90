"""The merging benchmark: what is merged is what is claimed, and memory is told per model."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_elastic_simulations.benchmarks.aggregation import BENCHMARK
from fl_elastic_simulations.benchmarks.benchmark import Request
from fl_elastic_simulations.engine.merging_cost import FLOWER, MERGED, WRITTEN, tensors_cost


@pytest.mark.slow
@pytest.mark.parametrize("kind", MERGED)
def test_a_round_of_two_replies_is_merged(kind: str) -> None:
    found = BENCHMARK.run(kind, 2)
    assert found["cpu_seconds"] > 0
    assert found["seconds_per_reply"] == found["cpu_seconds"] / 2
    assert found["peak_models"] >= 0


@pytest.mark.parametrize("kind", [FLOWER, *WRITTEN])
def test_models_of_few_tensors_are_merged_in_every_codec(kind: str) -> None:
    found = tensors_cost(kind, 2, 3, numbers=1000)
    assert found["cpu_seconds"] > 0
    assert found["seconds_per_reply"] == found["cpu_seconds"] / 3
    assert ("freed_seconds_per_reply" in found) == (kind == FLOWER)


def test_few_tensors_are_compared_within_a_turn() -> None:
    rows = {}
    for turn, (flower, ours) in enumerate(((0.001, 0.002), (0.004, 0.004), (0.010, 0.015))):
        rows[f"20 tensors | {FLOWER} | {turn}"] = {
            "seconds_per_reply": flower,
            "freed_seconds_per_reply": flower / 4,
        }
        rows[f"20 tensors | int8 | {turn}"] = {"seconds_per_reply": ours}
    table = BENCHMARK.tables(rows)["tensors"]
    assert table.loc["20"].tolist() == ["4.0 ms", "1.0 ms", "", "", "", "4.0 ms (1.50)", ""]
    assert table.loc["200"].tolist() == [""] * 7


def test_costs_are_medians_of_turns(tmp_path: Path) -> None:
    cases = list(BENCHMARK.cases(Request(tmp_path), {}).values())
    assert cases[:4] == [(kind, 10) for kind in (*MERGED, MERGED[0])]
    rows = {
        f"{MERGED[0]} | 10 | {turn}": {"seconds_per_reply": seconds, "peak_models": 12.0}
        for turn, seconds in enumerate((0.01, 0.02, 0.09))
    }
    rows[f"{MERGED[0]} | 1000 | 0"] = {"seconds_per_reply": 0.012}
    column = BENCHMARK.tables(rows)["costs"].iloc[:, 0]
    assert column.tolist() == ["20.0 ms (12)", "", "12.0 ms"]
