"""The page of the federation benchmark says what the rows say, and asks nobody for anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fl_elastic.bench.federation_methods import OURS, REFERENCE
from fl_elastic.bench.federation_page import (
    federation_markdown,
    federation_table,
    write_federation_page,
)
from fl_elastic.bench.federation_summary import summarise_task
from fl_elastic.report.formats import MISSING, TIMES

TASK = "har-correlated"


def cell(level: float, bytes_per_test: float) -> dict[str, Any]:
    return {
        "final_accuracy": level * 0.9999,
        "rounds": 10,
        "simulated_seconds": 5.0,
        "uplink_bytes": 5 * bytes_per_test,
        "downlink_bytes": 1.0,
        "rejected": 0,
        "curve": [[float(t), t * bytes_per_test, level * min(t, 3) / 3] for t in range(6)],
        "coverage": {"1": {"mean": 1.0, "least": 0.9}, "1/4": {"mean": 0.5, "least": 0.25}},
        "cpu_seconds": 1.0,
    }


@pytest.fixture
def rows() -> dict[str, dict[str, Any]]:
    found = {
        f"{TASK} | {method} | {seed}": cell(level + 0.01 * seed, sent)
        for method, level, sent in ((REFERENCE, 0.4, 1e6), (OURS, 0.8, 5e5), ("fedel", 0.2, 1e6))
        for seed in (0, 1)
    }
    methods = [REFERENCE, OURS, "fedel"]
    summaries = summarise_task(found, TASK, methods)
    return found | {f"summary {TASK} | {method}": row for method, row in summaries.items()}


def test_the_table_holds_what_was_measured(rows: dict[str, dict[str, Any]]) -> None:
    table = {row[0]: row[1:] for row in federation_table(rows, TASK)}
    assert list(table) == [REFERENCE, "fedel", OURS]
    seeds, accuracy, against, time, uplink, rounds, total, least = table[OURS]
    assert (seeds, rounds, least) == ("2", "10", "0.25")
    assert accuracy.startswith("80.5 ± ") and against.startswith("+40.0")
    # Means of three tests: the reference is at its 0.4 after five seconds, ours after three, at half the bytes.
    assert time == f"1.7{TIMES}" and uplink == f"3.3{TIMES}"
    assert total == "2.50 MB"
    assert table["fedel"][3] == MISSING


def test_the_short_table_says_where_only_some_seeds_got_there(
    rows: dict[str, dict[str, Any]],
) -> None:
    lines = {line.split(" | ")[0][2:]: line for line in federation_markdown(rows, [TASK])}
    assert lines[OURS].endswith("(1.7x, 3.3x) |") and lines["fedel"].endswith("(never) |")
    rows[f"{TASK} | fedel | 1"] = cell(0.6, 1e6)
    row = summarise_task(rows, TASK, ["fedel"])["fedel"]
    (line,) = federation_markdown({f"summary {TASK} | fedel": row}, [TASK])[2:]
    assert line.endswith("x in 1 of 2) |")


def test_nothing_of_a_task_without_cells_is_shown() -> None:
    assert federation_table({}, TASK) == []


def test_the_page_has_no_script_no_address_and_every_method(
    rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    page = write_federation_page(rows, {"machine": "<b>x</b>"}, tmp_path / "page.html").read_text()
    assert "<script" not in page and not re.search(r"https?://", page)
    assert page.count("<h2>") == 1 and "&lt;b&gt;x" in page
    for method in (REFERENCE, OURS, "fedel"):
        assert f'<th scope="row">{method}</th>' in page and f"<title>{method}</title>" in page
    lines = re.findall(r'polyline points="([^"]+)"', page)
    assert len(lines) == 3
    for line in lines:
        heights = [float(point.split(",")[1]) for point in line.split()]
        assert all(0 <= y <= 300 for y in heights) and heights[0] > heights[-1]
