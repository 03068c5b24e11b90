"""The mechanism of benchmarks: cases run once in processes that end, rows are kept, tables stand between marks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.benchmarks.benchmark import (
    Benchmark,
    Request,
    Results,
    Row,
    Rows,
    add_missing,
    chosen_tasks,
    fill,
    markdown,
)
from fl_elastic_simulations.cli.bench import BENCHMARKS, bench, load
from fl_elastic_simulations.cli.bench import fill as fill_documents


def cell(folder: str, number: int, seconds: float) -> dict[str, int]:
    """Say that it began, take its time, say that it ended."""
    Path(folder, f"begun-{number}").write_text(str(os.getpid()))
    time.sleep(seconds)
    Path(folder, f"ended-{number}").touch()
    if number == 99:
        raise ValueError("a cell of its own mind")
    return {"number": number, "process": os.getpid()}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_a_benchmark_does_not_choose_by_is_refused(name: str, tmp_path: Path) -> None:
    """It would measure everything, for minutes or hours."""
    benchmark = load(name)
    asked = {"tasks": ("x",), "methods": ("x",), "seeds": (7,), "settings": {"x": "y"}}
    for each in asked.keys() - set(benchmark.takes):
        request = Request(tmp_path, **{each: asked[each]})  # type: ignore[arg-type]
        with pytest.raises(ScenarioError, match=f"{name} has no {each} to choose from"):
            benchmark.measure(Results(tmp_path / "rows.json"), request, 1, print)


class Squares(Benchmark):
    """Two squares, and then their sum."""

    name = "squares"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        cases: dict[str, tuple[Any, ...]] = {"two": (2,), "three": (3,)}
        if all(name in rows for name in cases):
            cases["sum"] = (sum(rows[name]["square"] for name in cases) ** 0.5,)
        return cases

    def run(self, number: float) -> Row:
        return {"square": round(number**2)}

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        table = pd.DataFrame({"square": {name: str(row["square"]) for name, row in rows.items()}})
        return {"all": table, "none": pd.DataFrame()}


def add(results: Results, cells: dict[str, tuple[Any, ...]], **more: Any) -> list[str]:
    heard: list[str] = []
    add_missing(results, cell, cells, 2, heard.append, lambda row: f"is {row['number']}", **more)
    return heard


@pytest.mark.slow
def test_every_case_is_run_once_and_kept(tmp_path: Path) -> None:
    results = Results(tmp_path / "table.json")
    cells = {f"cell {number}": (str(tmp_path), number, 0.0) for number in range(3)}
    heard = add(results, cells)
    assert sorted(line.split(" ", 1)[1] for line in heard) == [
        f"cell {n}: is {n}" for n in range(3)
    ]
    assert add(Results(results.path), cells) == []


@pytest.mark.slow
def test_a_case_may_have_a_process_of_its_own(tmp_path: Path) -> None:
    results = Results(tmp_path / "table.json")
    add(results, {f"{n}": (str(tmp_path), n, 0.0) for n in range(2)}, fresh=True)
    assert len({row["process"] for row in results.rows.values()}) == 2


@pytest.mark.slow
def test_a_failing_case_is_heard_of_and_ends_the_others(tmp_path: Path) -> None:
    cells = {"bad": (str(tmp_path), 99, 0.0), "long": (str(tmp_path), 1, 600.0)}
    with pytest.raises(ValueError, match="own mind"):
        add(Results(tmp_path / "table.json"), cells)
    assert _all_gone(tmp_path)
    assert not (tmp_path / "ended-1").exists()


@pytest.mark.slow
def test_cases_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "from pathlib import Path\n"
        "from test_benchmark import add\n"
        "from fl_elastic_simulations.benchmarks.benchmark import Results\n"
        "if __name__ == '__main__':\n"
        f"    folder = {str(tmp_path)!r}\n"
        "    add(Results(Path(folder) / 'table.json'), {'long': (folder, 1, 600.0)})\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[level]) for level in (0, 2, 3)])
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path})
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "begun-1").exists() and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert (tmp_path / "begun-1").exists()
    assert _all_gone(tmp_path)


def _all_gone(folder: Path) -> bool:
    """Whether the processes of all cases that began are gone within a while."""
    end = time.monotonic() + 20
    pids = [int(path.read_text() or 0) for path in folder.glob("begun-*")]
    while time.monotonic() < end:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        # A process that ended and was not waited for is still listed.
        return pid > 0 and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]
    except OSError:
        return False


@pytest.mark.slow
def test_cases_that_follow_from_rows_come_after_them(tmp_path: Path) -> None:
    results, heard = Results(tmp_path / "table.json"), list[str]()
    Squares().measure(results, Request(tmp_path), 1, heard.append)
    assert results.rows == {"two": {"square": 4}, "three": {"square": 9}, "sum": {"square": 13}}
    assert len(heard) == 3


def test_rows_say_where_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    row = {"curve": [[0.5, -1], [2e-9, 3]], "names": ["a, [b", "c\n]"], "none": []}
    Results(path).add("a", row)
    Results(path).add("b", {"value": 2.5})
    stored = json.loads(path.read_text())
    assert stored["rows"] == {"a": row, "b": {"value": 2.5}}
    assert {"python", "torch", "machine", "date"} <= set(stored["environment"])
    # A point of a curve takes one line.
    assert "[0.5, -1],\n" in path.read_text()


def test_several_processes_fill_one_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    one, other = Results(path), Results(path)
    one.add("a", {"value": 1})
    other.add("b", {"value": 2})
    one.add("c", {"value": 3})
    assert set(Results(path).rows) == {"a", "b", "c"} == set(one.rows)


def test_a_fresh_table_forgets_the_rows_before_it_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("not a table")
    Results(path).add("old", {"value": 1})
    fresh = Results(path, fresh=True)
    fresh.add("a", {"value": 2})
    Results(path).add("b", {"value": 3})
    fresh.add("c", {"value": 4})
    assert set(Results(path).rows) == {"a", "b", "c"}


def test_tables_stand_between_their_marks_alone() -> None:
    text = "a\n<!-- squares all -->\nold\n<!-- end -->\nb\n<!-- end -->"
    filled = "a\n<!-- squares all -->\n| | square |\n| --- | --- |\n| two | 4 |\n<!-- end -->\nb\n<!-- end -->"
    assert fill(text, Squares(), {"two": {"square": 4}}) == filled
    with pytest.raises(ScenarioError, match="no table 'some' of squares: known are all, none"):
        fill(text.replace("all", "some"), Squares(), {})
    for endless in (
        text.replace("<!-- end -->", ""),
        text.replace("<!-- end -->", "<!-- squares all -->", 1),
        text.replace("<!-- end -->", "<!-- other all -->", 1),
        text.replace("all -->\n", "all --> "),
    ):
        with pytest.raises(ScenarioError, match="<!-- squares all --> has no <!-- end -->"):
            fill(endless, Squares(), {"two": {"square": 4}})
    assert markdown(pd.DataFrame()) == "No row of this table is measured yet."


def test_notes_stand_below_a_table() -> None:
    table = pd.DataFrame({"x": {"a": "1", "b": None}}).rename_axis("name")
    table.attrs["notes"] = ["Said below."]
    assert markdown(table).splitlines()[2:] == ["| a | 1 |", "| b |  |", "", "Said below."]


def test_unknown_tasks_are_named() -> None:
    assert chosen_tasks((), ["birds", "signs"]) == ["birds", "signs"]
    with pytest.raises(ScenarioError, match=r"unknown task 'bird'.*did you mean 'birds'"):
        chosen_tasks(["bird"], ["birds", "signs"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_committed_rows_are_shown_without_measuring(name: str) -> None:
    benchmark = load(name)
    assert benchmark.name == name and BENCHMARKS[name].endswith(".")
    rows = (
        Path(__file__).parents[2] / "results" / f"{benchmark.file or name.replace('-', '_')}.json"
    )
    before = rows.read_bytes()
    done = CliRunner().invoke(bench, [name, "--show", "--output", str(rows)])
    assert done.exit_code == 0, done.output
    assert "│" in done.output and rows.read_bytes() == before
    if name == min(BENCHMARKS):
        as_json = CliRunner().invoke(bench, [name, "--show", "--json", "--output", str(rows)])
        assert json.loads(as_json.output) == json.loads(before)["rows"]


def test_a_document_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"cannot read the document .*none\.md"):
        fill_documents([tmp_path / "none.md"])
    (tmp_path / "latin.md").write_bytes(b"\xe9")
    with pytest.raises(ScenarioError, match=r"cannot read the document .*latin\.md"):
        fill_documents([tmp_path / "latin.md"])
