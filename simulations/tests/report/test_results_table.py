"""The results table, in its cells and in the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from fl_elastic.cli.tables import print_table
from fl_elastic_simulations.report.formats import MISSING, TIMES
from fl_elastic_simulations.report.summary import read_summary
from fl_elastic_simulations.report.tables import results_grid, results_table, target_sentence

FULL = {
    "final_accuracy": 0.95,
    "final_accuracy_std": 0.01,
    "simulated_seconds": 812.0,
    "seconds_to_target": 410.0,
    "uplink_bytes": 2_000_000,
    "downlink_bytes": 4_000_000,
    "rejected_updates": 0,
}
ELASTIC = {
    **FULL,
    "final_accuracy": 0.948,
    "simulated_seconds": 406.0,
    "seconds_to_target": 164.0,
    "uplink_bytes": 500_000,
}


def summary_of(**methods: dict[str, Any]) -> dict[str, Any]:
    """Make the smallest summary that has everything the table shows."""
    return {"target_accuracy": 0.94, "seeds": [0, 1], "methods": methods}


def printed(table: Table, width: int = 80) -> str:
    """Return what the terminal shows."""
    console = Console(file=io.StringIO(), width=width)
    print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rows_hold_the_values_and_compare_with_the_first_method() -> None:
    grid = results_grid(read_summary(summary_of(full=FULL, elastic=ELASTIC)))
    assert grid.headings == (
        "Method",
        "Final accuracy",
        "Simulated time to target",
        "Simulated time in total",
        "Speed-up to target",
        "Uplink",
        "Downlink",
    )
    assert grid.rows[0] == (
        "full",
        "95.0 % ± 1.0",
        "6 min 50 s",
        "13 min 32 s",
        f"1.00{TIMES}",
        "2.00 MB (100 %)",
        "4.00 MB (100 %)",
    )
    assert grid.rows[1] == (
        "elastic",
        "94.8 % ± 1.0",
        "2 min 44 s",
        "6 min 46 s",
        f"2.50{TIMES}",
        "500 kB (25 %)",
        "4.00 MB (100 %)",
    )


def test_a_method_that_never_reached_the_target_has_no_speedup() -> None:
    missed = {**ELASTIC, "seconds_to_target": None}
    row = results_grid(read_summary(summary_of(full=FULL, elastic=missed))).rows[1]
    assert (row[2], row[4]) == ("not reached", MISSING)


def test_where_the_first_method_missed_the_target_the_total_time_is_compared() -> None:
    missed = {**FULL, "seconds_to_target": None}
    grid = results_grid(read_summary(summary_of(full=missed, elastic=ELASTIC)))
    assert grid.headings[4] == "Speed-up in total"
    assert grid.rows[1][4] == f"2.00{TIMES}"


def test_without_a_target_its_time_is_unknown_and_not_missed() -> None:
    summary = {**summary_of(full={}), "target_accuracy": None}
    row = results_grid(read_summary(summary)).rows[0]
    assert row == ("full", *([MISSING] * 6))
    assert target_sentence(read_summary(summary)) == "No target accuracy was set."


def test_one_seed_has_no_spread() -> None:
    summary = {**summary_of(full=FULL), "seeds": [0]}
    assert results_grid(read_summary(summary)).rows[0][1] == "95.0 %"


def test_nothing_sent_is_no_reference() -> None:
    silent = {**FULL, "uplink_bytes": 0}
    rows = results_grid(read_summary(summary_of(full=silent, elastic=ELASTIC))).rows
    assert (rows[0][5], rows[1][5]) == ("0 B", "500 kB")


def test_rejected_updates_have_a_column_only_where_there_are_any() -> None:
    rejecting = {**ELASTIC, "rejected_updates": 4}
    grid = results_grid(read_summary(summary_of(full=FULL, elastic=rejecting)))
    assert grid.headings[-1] == "Rejected updates"
    assert [row[-1] for row in grid.rows] == ["0", "4"]


def test_the_terminal_shows_every_cell_within_eighty_columns(
    make_summary: Callable[..., dict[str, Any]],
) -> None:
    summary = make_summary(("full", "elastic", "random", "head"))
    grid = results_grid(read_summary(summary))
    text = printed(results_table(summary))
    shown = set(text.split())
    assert max(map(len, text.splitlines())) <= 80
    for cell in (cell for row in (grid.headings, *grid.rows) for cell in row):
        assert set(cell.split()) <= shown
    assert "7 min 00 s" in text


@pytest.mark.parametrize("name", ["[red]", "[/]", "[link=x]y", "<script>"])
def test_a_name_is_no_markup(name: str) -> None:
    assert name in printed(results_table({**summary_of(**{name: FULL}), "title": name}), 200)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_figure_is_there_however_narrow_it_is(width: int) -> None:
    summary = summary_of(full=FULL, elastic={**ELASTIC, "rejected_updates": 117})
    shown = printed(results_table(summary), width).split()
    for row in results_grid(read_summary(summary)).rows:
        for word in " ".join(row).split():
            assert word in shown, (word, width)
    assert "117" in shown


def test_a_model_that_stayed_at_the_share_of_the_largest_class_is_no_sooner() -> None:
    stayed = {**ELASTIC, "final_accuracy": 0.801}
    learned = {**FULL, "final_accuracy": 0.95}

    def rows(**methods: dict[str, Any]) -> tuple[list[str], str]:
        results = read_summary({**summary_of(**methods), "largest_class": 0.799})
        grid = results_grid(results)
        place = next(i for i, text in enumerate(grid.headings) if "Speed-up" in text)
        return [row[place] for row in grid.rows], target_sentence(results)

    speedups, said = rows(full=learned, elastic=stayed)
    assert speedups == [f"1.00{TIMES}", MISSING]
    assert "Warning: elastic ended no better than the share of the largest class (79.9 %)" in said
    # Nothing is sooner than what has learned nothing.
    speedups, said = rows(full=stayed, elastic=learned, other=stayed)
    assert speedups == [MISSING] * 3 and "full and other ended no better" in said
    speedups, said = rows(full=learned, elastic=learned)
    assert MISSING not in speedups and "Warning" not in said
