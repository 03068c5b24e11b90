"""The long stream, short: rows for each part, within the bound, resumed where it was interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_elastic_simulations.benchmarks import soak
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.soak import Windows, bench_soak

PART = 1000


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    """Three activities that are easily told apart; a store that they fill."""
    monkeypatch.setattr(soak, "CAPACITY", 2**19)
    monkeypatch.setattr(soak, "EVERY", 500)
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 130)
    x = generator.normal(size=(130, 2, 16)) + 2 * labels[:, None, None]
    return Windows(x.astype(np.float32), labels)


def test_samples_are_the_same_each_time_and_differ_from_round_to_round(windows: Windows) -> None:
    first, again, later = (windows.batch(start, 50)[0] for start in (50, 50, 180))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, later) and np.abs(first - later).max() < 0.6
    assert windows.batch(100, 50)[1] == [*windows.y[100:].tolist(), *windows.y[:20].tolist()]


def test_a_row_for_each_part(windows: Windows, tmp_path: Path) -> None:
    results = Results(tmp_path / "soak.json")
    bench_soak(results, samples=3 * PART, windows=windows, every_row=PART, tell=lambda _: None)
    assert list(results.rows) == ["1,000 samples", "2,000 samples", "3,000 samples", "whole"]
    for row in list(results.rows.values())[:3]:
        assert row["samples"] == PART and row["classes"] == 3 and row["refused"] == 0
        assert 2**18 < row["store_bytes"] <= row["store_bound"] == 2**19
        assert row["resident_bytes"] > 2**20 and row["adaptations"] >= 2
    whole = results.rows["whole"]
    assert whole["samples"] == 3 * PART and whole["store_bytes"] <= whole["store_bound"]
    assert results.rows["3,000 samples"]["accuracy"] > 0.9
    assert [each.name for each in tmp_path.iterdir()] == ["soak.json"]
    # There is nothing left to measure.
    before = (tmp_path / "soak.json").read_bytes()
    bench_soak(Results(tmp_path / "soak.json"), samples=3 * PART, every_row=PART)
    assert (tmp_path / "soak.json").read_bytes() == before


def test_an_interrupted_one_goes_on(windows: Windows, tmp_path: Path) -> None:
    class Interrupted(Results):
        def add(self, name: str, row: dict[str, object]) -> None:
            super().add(name, row)
            if name == "2,000 samples":
                raise KeyboardInterrupt

    path = tmp_path / "soak.json"
    with pytest.raises(KeyboardInterrupt):
        bench_soak(
            Interrupted(path), samples=3 * PART, windows=windows, every_row=PART,
            tell=lambda _: None,
        )  # fmt: skip
    assert (tmp_path / "soak.state" / "learner.state").exists()
    told: list[str] = []
    results = Results(path)
    bench_soak(results, samples=3 * PART, windows=windows, every_row=PART, tell=told.append)
    assert len(told) == 1 and told[0].startswith("3,000 samples")
    assert results.rows["whole"]["samples"] == 3 * PART
    assert not (tmp_path / "soak.state").exists()
