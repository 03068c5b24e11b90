"""Rows beside online learners: streams are what they say, cells are kept, tables leave chosen seeds out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_elastic.errors import DatasetError
from fl_elastic.streaming import StreamOptions
from fl_elastic_simulations.benchmarks import online
from fl_elastic_simulations.benchmarks.online import STREAMS
from fl_elastic_simulations.benchmarks.results import Results


@pytest.mark.parametrize("name", ["sea", "agrawal", "led", "digits"])
def test_a_stream_is_the_same_for_the_same_seed_and_changes_half_way(
    name: str, tmp_path: Path
) -> None:
    x, y = STREAMS[name].read(tmp_path, 1)
    again, _ = STREAMS[name].read(tmp_path, 1)
    other, _ = STREAMS[name].read(tmp_path, 2)
    assert np.array_equal(x, again) and not np.array_equal(x, other)
    assert len(x) == len(y) == (1797 if name == "digits" else 4000) and x.dtype == np.float32
    assert np.isfinite(x).all() and abs(x[:200].mean()) < 1e-3


def test_a_table_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="elec"):
        STREAMS["electricity"].read(tmp_path, 0)


def test_learners_run_and_finished_cells_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = STREAMS["sea"].read(tmp_path, 0)
    for name, method in online.METHODS.items():
        row = method((x[:120], y[:120]), 0)
        assert 0.2 < row["accuracy"] <= 1 and row["seconds"] >= 0, name
    assert online.METHODS[online.DEFAULT]((x[:120], y[:120]), 0)["adaptations"] == 2
    assert StreamOptions().steps == 50
    results = Results(tmp_path / "online.json")
    for stream in STREAMS:
        for method in online.METHODS:
            for seed in online.SEEDS:
                # The seed that was chosen on must not be in the table.
                chosen = (stream, seed) in online.CHOSEN_ON
                results.rows[f"{stream} | {method} | {seed}"] = {
                    "accuracy": 0.0 if chosen else 0.5, "seconds": 1.0
                }  # fmt: skip
    online.bench_online(results, tmp_path, tell=lambda _: pytest.fail("measured again"))
    table = online.online_markdown(results.rows)
    assert table.count("50.0 (1.0)") == len(STREAMS) * len(online.METHODS)
    del results.rows[f"led | {online.DEFAULT} | 2"]
    assert "| - |" in online.online_markdown(results.rows)
