"""The solver's witness: brute force over instances that cover the extremes."""

from __future__ import annotations

import numpy as np
import pytest

from fl_elastic_simulations.benchmarks import solver
from fl_elastic_simulations.benchmarks.benchmark import Request
from fl_elastic_simulations.benchmarks.solver import brute_force_value, random_instance


def test_every_case_gives_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in ("_INSTANCES", "_REPEATS", "_PLANS"):
        monkeypatch.setattr(solver, name, 3)
    benchmark = solver.Solver()
    rows = {
        name: benchmark.run(*case) for name, case in benchmark.cases(Request(tmp_path), {}).items()
    }
    assert rows["exactness"] == {"instances": 3, "mismatches": 0, "budget_overruns": 0}
    table = benchmark.tables(rows)["times"]
    assert list(table.index) == [name for name in rows if name != "exactness"]
    assert table.attrs["notes"] == ["0 of 3 instances differ from brute force."]


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
