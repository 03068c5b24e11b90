"""Benchmark tables: rows are kept, and an interrupted run goes on where it ended."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fl_elastic_simulations.benchmarks import solver as solver_module
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.solver import (
    bench_solver,
    brute_force_value,
    random_instance,
)

COMMITTED = json.loads((Path(__file__).parents[2] / "results" / "solver.json").read_text())["rows"]


def test_rows_survive_and_say_where_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    Results(path).add("a", {"value": 1.5})
    again = Results(path)
    again.add("b", {"value": 2.5})
    stored = json.loads(path.read_text())
    assert stored["rows"] == {"a": {"value": 1.5}, "b": {"value": 2.5}}
    assert {"python", "torch", "machine", "date"} <= set(stored["environment"])


def test_a_curve_takes_a_line_for_each_point(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    row = {
        "curve": [[0.5, -1], [2e-9, 3]],
        "names": ["a, [b", "c\n]"],
        "none": [],
        "mixed": [1, {"x": [2, None]}],
    }
    Results(path).add("a", row)
    text = path.read_text()
    assert json.loads(text)["rows"] == {"a": row}
    assert "[0.5, -1],\n" in text
    assert "[2e-09, 3]\n" in text


def test_fresh_and_damaged_tables_start_empty(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    Results(path).add("a", {"value": 1.5})
    assert Results(path, fresh=True).rows == {}
    path.write_text("not a table")
    assert Results(path).rows == {}


def test_several_processes_fill_one_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    one, other = Results(path), Results(path)
    one.add("a", {"value": 1})
    other.add("b", {"value": 2})
    one.add("c", {"value": 3})
    assert set(Results(path).rows) == {"a", "b", "c"} == set(one.rows)
    other.catch_up()
    assert set(other.rows) == {"a", "b", "c"}


def test_a_fresh_table_forgets_the_rows_before_it_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    Results(path).add("old", {"value": 1})
    fresh = Results(path, fresh=True)
    fresh.add("a", {"value": 2})
    Results(path).add("b", {"value": 3})
    fresh.add("c", {"value": 4})
    assert set(Results(path).rows) == {"a", "b", "c"}


def test_measured_rows_are_not_measured_again(tmp_path: Path, monkeypatch) -> None:
    results = Results(tmp_path / "table.json")
    for name in ("time at 200 groups", "time at 500 groups", "plans at 150 groups"):
        results.add(name, {"kept": True})
    for name in ("_INSTANCES", "_REPEATS", "_PLANS"):
        monkeypatch.setattr(solver_module, name, 3)
    bench_solver(results)
    assert results.rows["time at 500 groups"] == {"kept": True}
    assert results.rows["exactness"]["instances"] == 3
    assert results.rows["exactness"]["mismatches"] == 0
    assert {*results.rows} == {*COMMITTED}
    assert results.rows["plans at 60 groups"].keys() == COMMITTED["plans at 60 groups"].keys()


def test_brute_force_charges_the_path_to_the_deepest_group() -> None:
    # The second group costs both paths and its own update: 1 + 2 + 3.
    value = brute_force_value(np.array([9.0, 3.0]), np.array([1.0, 2.0]), np.array([5.0, 4.0]), 6.0)
    assert value == 4.0
    assert brute_force_value(np.array([9.0]), np.array([1.0]), np.array([5.0]), 9.0) == 0.0


def test_instances_cover_zeros_and_both_extreme_budgets() -> None:
    generator = np.random.default_rng(1)
    drawn = [random_instance(generator) for _ in range(300)]
    assert any(budget == 0 for *_, budget in drawn)
    assert any(budget == u.sum() + p.sum() > 0 for u, p, _, budget in drawn)
    assert any((worth < 0).any() for _, _, worth, _ in drawn)
    assert any((u == 0).any() for u, *_ in drawn)
