"""The benchmark of where a head reads: small cells of bundled data, and the table made of hand-made rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_elastic.errors import ScenarioError
from fl_elastic.training.sums_size import sums_bytes
from fl_elastic_simulations.benchmarks.benchmark import Request, markdown
from fl_elastic_simulations.benchmarks.read import (
    BENCHMARK,
    CHOSEN,
    TASKS,
    ReadTask,
    read_cell,
)

DIGITS = ReadTask("Digits", "digits", "digits_cnn", pretrained=False, fixed="relu1@grid2")


@pytest.mark.slow
def test_a_cell_reads_where_it_says_and_charges_its_parts() -> None:
    rows = {
        method: read_cell(DIGITS, read, 0, "", examples=240)
        for method, read in DIGITS.methods((1, 8, 8)).items()
        if method in ("the input itself", "last layer", CHOSEN)
    }
    assert rows["the input itself"]["places"] == "input@flat"
    assert rows["the input itself"]["features"] == 64
    assert rows["last layer"]["places"] == "" and "@" in rows[CHOSEN]["places"]
    assert rows["the input itself"]["accuracy"] > 0.8
    assert rows[CHOSEN]["accuracy"] > rows["last layer"]["accuracy"]
    for row in rows.values():
        assert row["examples"] == 240 and 0 < row["error"] < 1
        assert min(row["pass_seconds"], row["solving_seconds"]) > 0
        # The upper triangle of the products in single precision, and the targets.
        few = row["features"] + 1
        assert row["sums_bytes"] == pytest.approx(4 * (few * (few + 1) / 2 + 10 * few), rel=0.2)
        # Held-out rows travel as well.
        most = sums_bytes(row["features"], 10, 240)
        assert row["sent_bytes"] == pytest.approx(most, rel=0.05, abs=600)
    few_of_them = read_cell(DIGITS, "auto>40", 0, "", examples=240)
    assert 0 < few_of_them["features"] <= 40 < rows[CHOSEN]["features"]
    errors = [error for _, error in rows[CHOSEN]["single"]]
    assert errors == sorted(errors) and not rows["last layer"]["single"]


def test_seeds_are_those_that_make_a_difference() -> None:
    whole, some = TASKS["birds"], TASKS["objects"]
    assert whole.seeds(CHOSEN, (0, 1)) == [0, 1] and whole.seeds("last layer", (0, 1)) == [0]
    assert some.seeds("last layer", (0, 1)) == [0, 1]
    untrained = TASKS["signs-from-scratch"]
    assert untrained.seeds("last layer", (0, 1)) == [0, 1]
    assert untrained.seeds("the input itself", (0, 1)) == [0]


def test_tables_show_means_in_the_order_of_the_methods() -> None:
    row = {
        "places": "input@flat", "accuracy": 0.5, "error": 0.25, "features": 3072, "choosing_seconds": 0.0,
        "pass_seconds": 1.0, "solving_seconds": 2.0, "sums_bytes": 4_000_000,
    }  # fmt: skip
    chosen = {**row, "places": "a@grid4", "choosing_seconds": 3.0}
    rows = {
        "birds | the input itself | 0": row,
        "birds | chosen places | 0": chosen,
        "birds | chosen places | 1": {**chosen, "accuracy": 0.6},
        "signs | last layer | 0": row,
    }
    lines = markdown(BENCHMARK.tables(rows)["birds"]).splitlines()
    assert lines[2:] == [
        "| chosen places | 2 | 55.0 ± 63.5 | 0.250 | 3,072 | 3.0 | 1.0 | 2.0 | 4.00 |",
        "| the input itself | 1 | 50.0 | 0.250 | 3,072 | 0.0 | 1.0 | 2.0 | 4.00 |",
        "",
        "Chosen: `a@grid4`.",
    ]


def test_the_table_of_sizes_shows_what_is_read_and_sent() -> None:
    row = {"accuracy": 0.5, "features": 120, "sent_bytes": 1_500_000}
    rows = {
        "signs | at most 128 | 0": row,
        "signs | at most 128 | 1": {**row, "accuracy": 0.6},
        "birds | at most 128 | 0": row,
        "signs | at most 2048 | 0": {**row, "features": 2000},
    }
    tables = BENCHMARK.tables(rows)
    assert markdown(tables["sizes"]).splitlines()[2:] == [
        "| 128 | 55.0 (120, 1.50 MB) |  | 50.0 (120, 1.50 MB) |  |",
        "| 2,048 | 50.0 (2,000, 1.50 MB) |  |  |  |",
    ]
    assert tables["signs"].empty


def test_an_unknown_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="brids"):
        BENCHMARK.cases(Request(tmp_path, tasks=["brids"]), {})
