"""The federation benchmark: every method runs in a small fleet, and its table is what the cells say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_elastic.bench import Results, bench_federation
from fl_elastic.bench import federation as federation_module
from fl_elastic.bench.federation import cell_name, federation_cell, task_profile
from fl_elastic.bench.federation_methods import ABLATIONS, METHODS, OURS, REFERENCE
from fl_elastic.bench.federation_summary import interval, reached, summarise_task
from fl_elastic.bench.federation_tasks import TASKS, FederationTask, method_key, task_scenario
from fl_elastic.errors import ScenarioError

SMALL = FederationTask(
    title="Digits",
    data={"dataset": "digits", "partition": "dirichlet", "alpha": 0.5, "layout": "correlated"},
    model="digits_cnn",
    speeds=((1.0, 2), (3.0, 2)),
    training={"local_steps": 4, "batch_size": 16, "learning_rate": 0.05},
    reference_rounds=1,
    ablated=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profiles")
    task_profile("small", SMALL, made, "")
    return made


def cell(folder: Path, method: str) -> dict[str, Any]:
    return federation_cell("small", SMALL, method, 0, str(folder), "")


@pytest.mark.parametrize("method", [*METHODS, *ABLATIONS])
def test_every_method_trains_in_the_same_time(folder: Path, method: str) -> None:
    row = cell(folder, method)
    limit = task_profile("small", SMALL, folder, "").full_step_seconds * 4 * 3
    assert row["simulated_seconds"] >= limit
    assert 0 <= row["final_accuracy"] <= 1
    assert row["curve"][0][:2] == [0.0, 0] and len(row["curve"]) > 1
    assert row["curve"][-1][1] == row["uplink_bytes"] > 0
    waits = method.startswith("fedavg, waiting")
    assert (row["rounds"] == 1) == waits
    assert (row["rejected"] > 0) == (method == "fedavg, dropping")
    if method == "fedavg, dropping":
        assert row["coverage"]["1/3"]["mean"] == 0.0 and row["coverage"]["1"]["least"] == 1.0


def test_a_round_that_fits_the_deadline_takes_no_longer(folder: Path) -> None:
    """The fastest class's full round is the deadline: ours may not be slower than dropping the slow ones."""
    ours, dropping = cell(folder, OURS), cell(folder, "fedavg, dropping")
    per_round = [row["simulated_seconds"] / row["rounds"] for row in (ours, dropping)]
    assert per_round[0] <= per_round[1] * 1.05


def test_a_cell_is_reproducible(folder: Path) -> None:
    one, other = cell(folder, OURS), cell(folder, OURS)
    del one["cpu_seconds"], other["cpu_seconds"]
    assert one == other


def test_finished_cells_are_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "small", replace(SMALL, ablated=False, methods=_two_methods()))
    monkeypatch.setattr(federation_module, "finished_cells", _here)
    results = Results(tmp_path / "table.json")
    said: list[str] = []
    bench_federation(results, tasks=["small"], seeds=[0], tell=said.append)
    assert len(said) == 2
    kept = dict(results.rows)
    again: list[str] = []
    bench_federation(Results(results.path), tasks=["small"], seeds=[0], tell=again.append)
    assert again == []
    assert set(kept) >= {cell_name("small", REFERENCE, 0), f"summary small | {OURS}"}
    assert kept[f"summary small | {REFERENCE}"]["time_ratio"] in (None, 1.0)
    with pytest.raises(ScenarioError, match=r"smal.*did you mean 'small'"):
        bench_federation(results, tasks=["smal"])


def _two_methods() -> dict[str, Any]:
    return {name: METHODS[name] for name in (REFERENCE, OURS)}


def _here(run: Any, cells: dict[str, Any], workers: int) -> Iterator[tuple[str, Any]]:
    """Run in this process what the benchmark would run in others."""
    for name, arguments in cells.items():
        yield name, run(*arguments)


def curve(*accuracies: float) -> list[list[float]]:
    return [[float(i), 10 * i, accuracy] for i, accuracy in enumerate(accuracies)]


def made_up(final: float, *accuracies: float, sent: float = 1.0) -> dict[str, Any]:
    return {
        "final_accuracy": final,
        "rounds": 5,
        "simulated_seconds": 9.0,
        "uplink_bytes": 100 * sent,
        "rejected": 0,
        "cpu_seconds": 1.0,
        "curve": curve(*accuracies),
        "coverage": {"1": {"mean": 1.0, "least": 0.5}},
    }


def test_ratios_are_those_to_the_references_own_accuracy() -> None:
    slow = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6]
    fast = [0.0, 0.6, 0.6, 0.6, 0.6]
    never = [0.0, 0.1, 0.1, 0.1]
    rows = {
        cell_name("t", REFERENCE, 0): made_up(0.6, *slow),
        cell_name("t", "fast", 0): made_up(0.6, *fast),
        cell_name("t", "never", 0): made_up(0.1, *never),
        cell_name("other", "fast", 0): made_up(0.9, *fast),
        "summary t | fast": {},
    }
    found = summarise_task(rows, "t", ["fast", "never", REFERENCE, "missing"])
    assert list(found) == ["fast", "never", REFERENCE]
    # Three tests of 0.6 are over at 8 and at 3.
    assert found["fast"]["time_ratio"] == pytest.approx(8 / 3)
    assert found["fast"]["uplink_ratio"] == pytest.approx(80 / 30)
    assert found["never"]["reached"] == 0 and found["never"]["time_ratio"] is None
    assert found["never"]["against_reference"] == pytest.approx(-0.5)
    assert found[REFERENCE]["time_ratio"] == 1.0


def test_intervals_are_students() -> None:
    values = [0.5, 0.7, 0.6, 0.8]
    expected = 3.182 * np.std(values, ddof=1) / 2
    assert interval(values) == pytest.approx(expected)
    assert interval([0.5]) is None
    assert reached(curve(0.1, 0.2), 0.9) is None


def test_every_task_is_a_scenario_with_every_method() -> None:
    for task in TASKS.values():
        scenario = task_scenario(task)
        names = [method.name for method in scenario.methods]
        assert names == [method_key(name) for name in task.all_methods]
        assert len(scenario.clients) == sum(count for _, count in task.speeds)
        assert {client.device.slowdown for client in scenario.clients} == {
            s for s, _ in task.speeds
        }
