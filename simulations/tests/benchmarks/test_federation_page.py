"""The page of the federation benchmark says what the rows say, and asks nobody for anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fl_elastic_simulations.benchmarks.federation_methods import METHODS, OURS, REFERENCE
from fl_elastic_simulations.benchmarks.federation_page import (
    HIGHLIGHTED,
    federation_table,
    write_federation_page,
)
from fl_elastic_simulations.benchmarks.federation_tables import (
    charged_markdown,
    federation_markdown,
    filled,
)
from fl_elastic_simulations.benchmarks.federation_tasks import TASKS
from fl_elastic_simulations.report.formats import MISSING, TIMES

TASK = "har-correlated"
ONE = {TASK: TASKS[TASK]}


def cell(level: float, up: float, down: float = 1e6, choosing: float = 0.0) -> dict[str, Any]:
    return {
        "final_accuracy": level * 0.9999,
        "rounds": 10,
        "simulated_seconds": 5.0,
        "uplink_bytes": 5 * up,
        "downlink_bytes": 5 * down,
        "rejected": 3,
        "client_seconds": 40.0,
        "choosing_seconds": choosing,
        "profile_seconds": choosing / 4,
        "curve": [[float(t), t * up, t * down, level * min(t, 3) / 3] for t in range(6)],
        "coverage": {"1": {"mean": 1.0, "least": 0.9}, "1/4": {"mean": 0.5, "least": 0.25}},
        "cpu_seconds": 1.0,
    }


@pytest.fixture
def rows() -> dict[str, dict[str, Any]]:
    made = (
        (REFERENCE, 0.4, 1e6, 0.0), (OURS, 0.8, 5e5, 4.0), ("fedel", 0.2, 1e6, 8.0),
    )  # fmt: skip
    return {
        f"{TASK} | {method} | {seed}": cell(level + 0.01 * seed, up, choosing=choosing)
        for method, level, up, choosing in made
        for seed in (0, 1)
    }


def test_the_table_holds_what_was_measured(rows: dict[str, dict[str, Any]]) -> None:
    table = {row[0]: row[1:] for row in federation_table(rows, TASK)}
    assert list(table) == [name for name in METHODS if name in (REFERENCE, OURS, "fedel")]
    seeds, accuracy, against, time, uplink, both, rounds, *totals = table[OURS]
    assert (seeds, rounds) == ("2", "10")
    assert accuracy.startswith("80.5 ± ") and against.startswith("+40.0")
    # The reference is at its 0.4 after three seconds, ours after two, with half the bytes up and as many down:
    # 3 + 3 MB against 1 + 2.
    assert (time, uplink, both) == (f"1.5{TIMES}", f"3{TIMES}", f"2{TIMES}")
    assert totals == ["2.50 MB", "5.00 MB", "3", "10.0 %", "2.5 %", "0.25"]
    assert table["fedel"][3:6] == (MISSING, MISSING, MISSING)


def test_the_short_table_says_where_only_some_seeds_got_there(
    rows: dict[str, dict[str, Any]],
) -> None:
    lines = {line.split(" | ")[0][2:]: line for line in federation_markdown(rows, ONE)}
    assert lines[OURS].endswith("(1.5x, 3.0x, 2.0x) [2 of 3 seeds] |")
    assert lines["fedel"].endswith("(never) [2 of 3 seeds] |")
    rows[f"{TASK} | fedel | 1"] = cell(0.6, 1e6)
    (line,) = (each for each in federation_markdown(rows, ONE) if each.startswith("| fedel"))
    assert line.endswith("x in 1 of 2) [2 of 3 seeds] |")
    everything = rows | {f"{TASK} | {REFERENCE} | 2": cell(0.4, 1e6)}
    (line,) = (e for e in federation_markdown(everything, ONE) if e.startswith(f"| {REFERENCE}"))
    assert line.endswith("(1.0x, 1.0x, 1.0x) |")


def test_what_choosing_takes_is_named_in_seconds_and_shares(
    rows: dict[str, dict[str, Any]],
) -> None:
    lines = {line.split(" | ")[0][2:]: line for line in charged_markdown(rows, ONE)}
    assert lines[REFERENCE] == f"| {REFERENCE} | none |"
    assert lines[OURS] == f"| {OURS} | 4 s (10.0 %), 1 s (2.5 %) |"


def test_documents_hold_exactly_the_tables_between_their_marks(
    rows: dict[str, dict[str, Any]],
) -> None:
    text = (
        "before\n<!-- federation accuracy -->\n| an old table |\n<!-- end -->\nbetween\n"
        "<!-- federation charges -->\n<!-- end -->\nafter\n"
    )
    new = filled(text, rows)
    assert new == filled(new, rows) != text
    for line in (*federation_markdown(rows, ONE), *charged_markdown(rows, ONE)):
        assert line in new.splitlines()
    assert "old" not in new and new.startswith("before\n") and new.endswith("after\n")
    assert filled(new, {}).count("No cell of this table is measured yet.") == 2


def test_nothing_of_a_task_without_cells_is_shown() -> None:
    assert federation_table({}, TASK) == []


def test_the_page_asks_nobody_and_draws_every_method(
    rows: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")
    other = next(name for name in METHODS if name not in HIGHLIGHTED)
    rows |= {f"{TASK} | {other} | 0": cell(0.3, 1e6)}
    page = write_federation_page(rows, {"machine": "<b>x</b>"}, tmp_path / "page.html").read_text()
    assert page.count("<script") == 3 and not re.search(r"https?://", page)
    assert page.count("<h2>") == 1 and "&lt;b&gt;x" in page
    assert f"3{TIMES} is a third of the time. {MISSING} means never" in page
    table = [list(row) for row in federation_table(rows, TASK)]
    shown = re.findall(r"<tr><th [^>]*>(.*?)</th>(.*?)</tr>", page, re.S)[1:]
    assert [[name, *re.findall(r"<td[^>]*>(.*?)</td>", cells)] for name, cells in shown] == table
    figures = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    lines = figures[f"plot-{TASK}"]["data"]
    assert [line["name"] for line in lines] == [other, REFERENCE, OURS, "fedel"]
    assert [line["legendgroup"] for line in lines] == ["", "0", "1", "2"]
    assert len({line["line"]["color"] for line in lines}) == 4
    buttons = re.findall(r'<button [^>]*data-method="(\d)".*?</span>(.*?)</button>', page, re.S)
    assert buttons == [("0", REFERENCE), ("1", OURS), ("2", "fedel")]
    ours = lines[2]
    assert (ours["x"][0], ours["x"][-1], ours["y"][0]) == (0, 5, 0)
    # The mean of two seeds that end at 0.8 and 0.81.
    assert ours["y"][-1] == pytest.approx(0.805)
