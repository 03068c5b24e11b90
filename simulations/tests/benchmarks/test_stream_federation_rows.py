"""The table of federated streams: scores of devices, means over them, and what is compared with being alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import fl_elastic_simulations.benchmarks.stream_federation as bench
from fl_elastic.errors import RegistryError
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.stream_recovery import client_score, combined


def stream(right_before: int, wrong: int, right_after: int) -> list[bool]:
    return [True] * right_before + [False] * wrong + [True] * right_after


def test_a_device_is_back_once_it_is_as_good_in_the_changed_world_alone() -> None:
    quick = client_score(stream(200, 25, 300), 200, 200, [], fading=0.98)
    slow = client_score(stream(200, 100, 200), 200, 200, [230], fading=0.98)
    never = client_score(stream(200, 300, 0), 200, 200, [], fading=0.98)
    assert 25 < quick.level < quick.recovery < slow.recovery and quick.recovered
    assert quick.after == 0.875 and slow.after == 0.5 and quick.before == 1.0
    assert never.recovery == never.level == 300 and not never.recovered
    assert slow.delay == 30 and math.isnan(quick.delay)
    # One that never noticed anything has been good from the first sample that counts.
    assert client_score(stream(500, 0, 0), 200, 200, [], fading=0.98).recovery == 20


def test_means_are_over_those_that_were_hit_and_over_the_others() -> None:
    hit = [
        client_score(stream(100 * n, 20 * n, 200), 100 * n, 100, [100 * n + 30], 0.98)
        for n in (1, 2, 3)
    ]
    spared = [client_score(stream(100, n, 300), None, 100, [], 0.98) for n in (0, 100)]
    found = combined([*spared, *reversed(hit)])
    assert found["recovery"] == pytest.approx(sum(each.recovery for each in hit) / 3)
    assert found["recovery_each"] == [each.recovery for each in hit]
    assert found["late_to_level"] == hit[2].level
    assert found["not_hit"] == pytest.approx((1.0 + 0.75) / 2)
    assert found["not_hit_each"] == [1.0, 0.75] and found["noticed"] == 3 and found["delay"] == 30


def test_cells_that_are_there_are_kept_and_compared_with_being_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def cells(run: Any, wanted: dict[str, Any], workers: int) -> Any:
        for name in wanted:
            asked.append(name)
            method, _, seed = name.partition(" | ")
            value = 100.0 + int(seed) - (40 if method == "measured" else 0)
            row = dict.fromkeys(
                ("recovery", "late_recovery", "recovered", "to_level", "late_to_level",
                 "after_drift", "late_after_drift", "not_hit", "before_drift", "cpu_seconds"), value,
            )  # fmt: skip
            yield name, row | {"not_hit_each": [value, value + 1]}

    monkeypatch.setattr("fl_elastic_simulations.benchmarks.cells.finished_cells", cells)
    results = Results(tmp_path / "table.json")
    bench.bench_stream_federation(
        results, tmp_path, methods=["alone", "measured"], seeds=[0, 1], tell=lambda _: None
    )
    assert asked == ["alone | 0", "measured | 0", "alone | 1", "measured | 1"]
    assert results.rows["summary measured"]["recovery"] == 60.5
    assert results.rows["against alone measured"]["recovery"] == -40
    assert results.rows["against alone measured"]["not_hit_worst"] == -40
    bench.bench_stream_federation(
        Results(tmp_path / "table.json"), tmp_path, methods=["alone", "measured"], seeds=[0, 1, 2],
        tell=lambda _: None,
    )  # fmt: skip
    assert asked[4:] == ["alone | 2", "measured | 2"]
    with pytest.raises(RegistryError, match="did you mean 'measured'"):
        bench.bench_stream_federation(results, tmp_path, methods=["measure"])
