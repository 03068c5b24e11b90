"""The benchmark of forgetting: the attack on made-up entropies, a small run that goes on, and its table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from slow_ones import slow_unless

from fl_elastic_simulations.benchmarks import forgetting as benchmark
from fl_elastic_simulations.benchmarks.forgetting import (
    bench_forget,
    forget_markdown,
    membership,
    ways_of,
)
from fl_elastic_simulations.benchmarks.forgetting_tasks import ForgetTask, split_of
from fl_elastic_simulations.benchmarks.results import Results


def test_who_is_as_certain_as_of_training_examples_is_taken_for_one() -> None:
    draw = np.random.default_rng(0)
    certain, unsure = draw.exponential(0.05, 400), 0.8 + draw.exponential(0.3, 100)
    assert membership(certain, unsure, draw.exponential(0.05, 200)) > 0.95
    assert membership(certain, unsure, 0.8 + draw.exponential(0.3, 200)) < 0.05
    # Classes are balanced: that there are more training examples says nothing.
    alike = draw.normal(size=500)
    assert 0.2 < membership(alike, draw.normal(size=50), draw.normal(size=300)) < 0.8


@pytest.mark.parametrize(
    ("share", "clients"),
    slow_unless(lambda _, clients: clients > 0, [(0.0, 0), (0.1, 0), (0.1, 3)]),
)
def test_a_run_goes_on_and_is_shown(
    share: float, clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ForgetTask("Digits", "digits", "digits_cnn", 5, 250, 100, share=share, clients=clients)
    ways = ways_of(task)
    monkeypatch.setattr(benchmark, "FORGET_TASKS", {"few": task})
    results, told = Results(tmp_path / "forget.json"), []
    bench_forget(results, seeds=(0,), tell=told.append)
    rows = dict(results.rows)
    assert set(rows) == {f"few | {method} | 0" for method in ways} and len(told) == len(ways)
    for row in rows.values():
        assert 0 <= row["forgotten"] <= 1 and 0 <= row["members"] <= 1
        assert (row["test_forgotten"] is None) == (share > 0)
    if not share:
        # Whoever never saw the class knows none of it.
        assert rows["few | retrained | 0"]["forgotten"] == 0
        assert rows["few | as it was | 0"]["forgotten"] > 0.5
    bench_forget(Results(results.path), seeds=(0,), tell=told.append)
    assert len(told) == len(ways), "finished rows are not measured again"
    table = forget_markdown(rows, "few").splitlines()
    assert len(table) == 2 + len(ways) and table[2].startswith("| as it was | 1 |")


def test_the_split_of_a_class_leaves_none_of_it(tmp_path: Path) -> None:
    split = split_of(ForgetTask("", "digits", "digits_cnn", 1, 500, 200), None, 3)
    label = set(split.forgotten[1].tolist())
    assert len(label) == 1 and not label & set(split.kept[1].tolist())
    assert set(split.test_forgotten[1].tolist()) == label
    assert not label & set(split.test_kept[1].tolist())
    assert len(split.kept[1]) + len(split.forgotten[1]) == 500


@pytest.mark.slow
def test_a_federation_forgets_a_class_that_it_hardly_knows_at_no_cost_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client alone has it; what the model gets wrong has the largest gradients of the loss, at every weight."""
    task = ForgetTask("Digits", "digits", "digits_cnn", 4, 1300, 450, clients=5)
    monkeypatch.setattr(benchmark, "FORGET_TASKS", {"few": task})
    results = Results(tmp_path / "forget.json")
    bench_forget(results, seeds=(2,), tell=lambda _: None)
    found = {name.split(" | ")[1]: row for name, row in results.rows.items()}
    assert 0.3 < found["as it was"]["test_forgotten"] < 0.9
    assert found["dampened"]["test_forgotten"] < 0.1
    assert found["dampened"]["kept"] > found["one round more"]["kept"] - 0.05
