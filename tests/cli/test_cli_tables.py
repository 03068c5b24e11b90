"""No figure of a table disappears, however narrow the terminal or the pipe is."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from fl_elastic.cli import cost_tables, fleet, fleet_status, plan
from fl_elastic.cli.planned import RefusedPolicy
from fl_elastic.cli.tables import print_table
from fl_elastic.fleet.doctor.finding import Finding
from fl_elastic.fleet.status import NodeRound, NodeStatus
from fl_elastic.planning.cost_report import CostReport
from fl_elastic.planning.run_schedule import RunAtCut, RunLength

words = st.text("abc0123456789.%", min_size=1, max_size=12)
cells = st.lists(words, min_size=1, max_size=3).map(" ".join)


def printed(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(table, console)
    assert console.width == width
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 9), st.sampled_from([10, 40, 80, 200]))
def test_every_word_of_every_cell_is_there(data: st.DataObject, columns: int, width: int) -> None:
    rows = data.draw(st.lists(st.lists(cells, min_size=columns, max_size=columns), max_size=4))
    table = Table()
    for place in range(columns):
        table.add_column(f"heading {place}", justify=data.draw(st.sampled_from(["left", "right"])))
    for row in rows:
        table.add_row(*row)
    found = re.findall(r"[^\s│┃]+", printed(table, width))
    missing = [word for row in rows for cell in row for word in cell.split() if word not in found]
    assert missing == [] and "…" not in "".join(found)


def test_a_wide_terminal_is_used_and_a_narrow_one_kept_to_where_it_is_enough() -> None:
    table = Table("a", "b")
    table.add_row("one two three", "four five six")
    assert "one two three" in printed(table, 80)
    lines = printed(table, 18).splitlines()
    assert max(map(len, lines)) <= 18 and any("three" in line for line in lines)


def test_room_goes_to_names_that_would_be_broken_first() -> None:
    table = Table()
    table.add_column("place", overflow="fold")
    for heading in ("ms an example", "share of the pass", "sums, kB", "held-out error"):
        table.add_column(heading)
    table.add_row("in:classifier.1@flat", "11.301", "100%", "3277", "0.350")
    assert "in:classifier.1@flat" in printed(table, 70)


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], show: Any) -> str:
    # What a pipe is taken for.
    monkeypatch.setenv("COLUMNS", "80")
    show()
    return capsys.readouterr().out


def costs(policy: str) -> CostReport:
    return CostReport(
        policy, 17, 15, 2, 1.2345, 21.37, 0.73, 111_000, 112_000, 113_000, 114_000, 115_000_000,
        116_000_000,
    )  # fmt: skip


def test_costs_of_policies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [costs("neuron_velocity_random"), costs("x"), RefusedPolicy("y", "no")]
    out = shown(monkeypatch, capsys, lambda: cost_tables.print_costs(reports, chosen="x"))
    for each in (
        "17",
        "15",
        "1234.5",
        "21.37",
        "73%",
        *(f"{n}k" for n in range(111, 115)),
        "115M",
        "116M",
    ):
        assert re.search(rf"(?<!\S){re.escape(each)}(?!\S)", out), (each, out)
    assert out.count("neuron") == 2 and max(map(len, out.splitlines())) <= 80


def test_a_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "encoder.layers.encoder_layer_11.self_attention.out_proj.with.a.name.that.does.not.end"
    group = {
        "name": name, "mode": "channels 113/512", "update_seconds": 123.456, "path_seconds": 234.567,
        "importance": 0.000123, "selected": True,
    }  # fmt: skip
    result = {
        "policy": "elastic", "groups": [group], "full_step_seconds": 1.0, "predicted_step_seconds": 0.5,
        "requested_speedup": 2.0, "achieved_speedup": 2.0, "measured_step_seconds": None,
        "step_fraction": 1.0,
    }  # fmt: skip
    out = shown(monkeypatch, capsys, lambda: plan._print("model", result))
    assert "123456.00" in out and "234567.00" in out and "0.000123" in out
    assert re.sub(r"[\s│]|channels|113/512|123456.00|234567.00|0.000123", "", out).count(name) == 1


def test_a_schedule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = [
        RunAtCut(f"features.denseblock4.denselayer{n}.conv2", 0.117 * n, 123_000_000 * n, 234_000_000,
                 345.6, 4.5678, 56789.0 / n, 67)
        for n in (1, 2)
    ]  # fmt: skip
    out = shown(
        monkeypatch, capsys, lambda: cost_tables.print_schedule(schedule, RunLength(9, 5, 100, 10))
    )
    for each in ("12%", "123M", "234M", "345.6", "4567.8", "56789"):
        assert each in out, (each, out)


def test_the_state_of_a_fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = NodeRound(
        round=12345, time="1700000000", step_seconds=12.345, temperature=71.0, coverage=0.43,
        disk_free_bytes=17 * 2**30,
    )  # fmt: skip
    node = NodeStatus(
        "a-node-with-a-name-of-32-letters", "1", "offline", "2026-01-02T03:04:05+00:00", last
    )
    out = shown(monkeypatch, capsys, lambda: print_table(fleet_status._table([node] * 2)))
    for each in ("12345,", "12345", "71", "43%", "17", "offline"):
        assert each in out, (each, out)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("name", ["pi0", "node0", "raspberry-pi-in-the-kitchen-0"])
def test_names_and_times_of_nodes_are_whole(name: str, width: int) -> None:
    last = NodeRound(round=2, time="1700000000", step_seconds=0.01, disk_free_bytes=58 * 2**30)
    node = NodeStatus(name, "1", "online", "2026-01-02T03:04:05+00:00", last)
    _, _, below = printed(fleet_status._table([node]), width).rpartition("─")
    rows = [row for row in below.splitlines() if row]
    assert "".join(row.split()[0] for row in rows if row[0] != " ") == name
    assert "03:04" in below and "online" in below


def test_findings_of_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/var/lib/fl-elastic/" + "/".join(["a-long-folder"] * 9)
    found = [Finding("disk", "fail", f"12.5 GiB free of 13.7 GiB in {path}", "delete 2 GiB")]
    out = shown(monkeypatch, capsys, lambda: print_table(fleet._table(found)))
    for each in ("12.5", "13.7", "fail"):
        assert each in out, (each, out)
    assert max(map(len, out.splitlines())) <= 80
