"""The federation benchmark: every method runs in a small fleet, and its table is what the cells say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_ones import slow_unless

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.benchmarks.federation import (
    bench_federation,
    cell_name,
    federation_cell,
    task_costs,
)
from fl_elastic_simulations.benchmarks.federation_methods import METHODS, OURS, REFERENCE
from fl_elastic_simulations.benchmarks.federation_summary import (
    interval,
    reached,
    sooner_than,
    summarise_task,
)
from fl_elastic_simulations.benchmarks.federation_tables import converged_markdown, ends_markdown
from fl_elastic_simulations.benchmarks.federation_tasks import (
    CONVERGED,
    PRETRAINED,
    TASKS,
    FederationTask,
    bandwidth_of,
    method_key,
    task_scenario,
)
from fl_elastic_simulations.benchmarks.results import Results

STEPS = 8
SMALL = FederationTask(
    title="Digits",
    data={
        "dataset": "digits",
        "partition": "dirichlet",
        "alpha": 0.5,
        "layout": "correlated",
        "train_limit": 240,
        "test_limit": 120,
    },
    model="digits_cnn",
    speeds=((1.0, 1), (3.0, 1)),
    training={"local_steps": STEPS, "batch_size": 16, "learning_rate": 0.05},
    reference_rounds=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profiles")
    task_costs("small", SMALL, made, "")
    return made


@cache
def cell(folder: Path, method: str) -> dict[str, Any]:
    return fresh_cell(folder, method)


def fresh_cell(folder: Path, method: str) -> dict[str, Any]:
    return federation_cell("small", SMALL, method, 0, str(folder), "")


PAYS = {"fl_elastic", "fl_elastic, int8", "fedel", "fedel, free probe, our server"} | {
    f"{name}, our server" for name in ("last layers", "random layers", "timelyfl", "slice_out")
}


# One of each kind; the others are among the slow tests.
FIRST = {
    "fedavg", "fedavg, waiting, our server", "heterofl", "fl_elastic", "fl_elastic, int8",
    "fedel, free probe, our server", "fewer full steps, our server",
}  # fmt: skip


@pytest.mark.parametrize(
    "method",
    slow_unless(FIRST.__contains__, METHODS),
)
def test_every_method_is_tested_at_the_same_times(folder: Path, method: str) -> None:
    row = cell(folder, method)
    profile, _ = task_costs("small", SMALL, folder, "")
    full_round = profile.full_step_seconds * STEPS * 3
    assert 2 * full_round < row["simulated_seconds"] < 2.5 * full_round
    assert 0 <= row["final_accuracy"] <= 1
    assert row["curve"][0][:3] == [0.0, 0, 0]
    times = [point[0] for point in row["curve"]]
    assert times == pytest.approx(np.linspace(0, row["simulated_seconds"], 41), abs=1e-3)
    last = [point[-1] for point in row["curve"][-4:]]
    assert row["final_accuracy"] == pytest.approx(np.mean(last), abs=1e-4)
    assert row["curve"][-1][1:3] == [row["uplink_bytes"], row["downlink_bytes"]]
    assert row["uplink_bytes"] > 0 and row["downlink_bytes"] > 0
    waits = method.startswith("fedavg, waiting")
    assert (row["rounds"] == 2) == waits
    assert (row["choosing_seconds"] > 0) == (method in PAYS)
    # Who keeps to a cut has to know where it lies.
    assert (row["profile_seconds"] > 0) == (method in PAYS or "cut" in METHODS[method])
    assert row["choosing_seconds"] + row["profile_seconds"] < row["client_seconds"]


@pytest.mark.parametrize("method", [name for name in METHODS if "waiting" not in name])
def test_no_round_takes_longer_than_its_deadline(folder: Path, method: str) -> None:
    """The fastest class's full round, and the way down to the slowest; exits make FedEL's model larger."""
    row, profile = cell(folder, method), task_costs("small", SMALL, folder, "")[0]
    bandwidth = bandwidth_of(SMALL, profile)
    deadline = STEPS * profile.full_step_seconds + float(profile.parameter_bytes.sum()) / bandwidth
    down = row["downlink_bytes"] / row["rounds"] / 2 / (2 * bandwidth)
    assert row["simulated_seconds"] / (row["rounds"] + 1) <= (deadline + down) * 1.01


@pytest.mark.parametrize("method", [OURS, "heterofl", "fedel"])
def test_a_cell_is_reproducible_from_the_stored_costs(folder: Path, method: str) -> None:
    one, other = cell(folder, method), fresh_cell(folder, method)
    assert {**one, "cpu_seconds": 0.0} == {**other, "cpu_seconds": 0.0}


@pytest.mark.parametrize(
    "method", [{"policy": "full", "round_zero": "closed_form"}, {"policy": "elastic"}]
)
def test_a_method_whose_costs_were_not_measured_is_not_run(
    folder: Path, method: dict[str, Any]
) -> None:
    later = replace(SMALL, methods={REFERENCE: METHODS[REFERENCE], "later": method})
    with pytest.raises(ScenarioError, match="was not measured"):
        federation_cell("small", later, "later", 0, str(folder), "")


def test_finished_cells_are_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "small", replace(SMALL, methods=_two_methods()))
    monkeypatch.setattr("fl_elastic_simulations.benchmarks.cells.finished_cells", _here)
    results = Results(tmp_path / "table.json")
    said: list[str] = []
    bench_federation(results, tasks=["small"], seeds=[0], methods=[OURS], tell=said.append)
    assert len(said) == 1
    bench_federation(results, tasks=["small"], seeds=[0], tell=said.append)
    assert len(said) == 2
    kept = dict(results.rows)
    again: list[str] = []
    bench_federation(Results(results.path), tasks=["small"], seeds=[0], tell=again.append)
    assert again == []
    assert set(kept) >= {cell_name("small", REFERENCE, 0), f"summary small | {OURS}"}
    assert kept[f"summary small | {REFERENCE}"]["time_ratio"] in (None, 1.0)
    with pytest.raises(ScenarioError, match=r"task 'smal'.*did you mean 'small'"):
        bench_federation(results, tasks=["smal"])
    with pytest.raises(ScenarioError, match=r"method 'fedell'.*did you mean 'fedel'"):
        bench_federation(results, tasks=["small"], methods=["fedell"])


def _two_methods() -> dict[str, Any]:
    return {name: METHODS[name] for name in (REFERENCE, OURS)}


def _here(run: Any, cells: dict[str, Any], workers: int) -> Iterator[tuple[str, Any]]:
    """Run in this process what the benchmark would run in others."""
    for name, arguments in cells.items():
        yield name, run(*arguments)


def curve(*accuracies: float) -> list[list[float]]:
    return [[float(i), 10 * i, 30 * i, accuracy] for i, accuracy in enumerate(accuracies)]


def made_up(final: float, *accuracies: float, choosing: float = 0.0) -> dict[str, Any]:
    return {
        "final_accuracy": final,
        "rounds": 5,
        "simulated_seconds": 9.0,
        "uplink_bytes": 100,
        "downlink_bytes": 300,
        "rejected": 0,
        "client_seconds": 50.0,
        "choosing_seconds": choosing,
        "profile_seconds": choosing / 2,
        "cpu_seconds": 1.0,
        "curve": curve(*accuracies),
        "coverage": {"1": {"mean": 1.0, "least": 0.5}},
    }


def test_ratios_are_those_to_the_references_own_accuracy() -> None:
    slow = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6]
    fast = [0.0, 0.2, 0.6, 0.6, 0.6]
    never = [0.0, 0.1, 0.1, 0.1]
    rows = {
        cell_name("t", REFERENCE, 0): made_up(0.6, *slow),
        cell_name("t", "fast", 0): made_up(0.6, *fast, choosing=5.0),
        cell_name("t", "never", 0): made_up(0.1, *never),
        cell_name("other", "fast", 0): made_up(0.9, *fast),
        "summary t | fast": {},
    }
    rows[cell_name("t", "fast", 0)]["curve"] = [
        [t, 10 * t, 50 * t, a] for t, _, _, a in curve(*fast)
    ]
    found = summarise_task(rows, "t", ["fast", "never", REFERENCE, "missing"])
    assert list(found) == ["fast", "never", REFERENCE]
    # The first test of 0.6 is at 6 and at 2; 60 + 180 bytes against 20 + 100.
    assert found["fast"]["time_ratio"] == pytest.approx(3)
    assert found["fast"]["uplink_ratio"] == pytest.approx(3)
    assert found["fast"]["bytes_ratio"] == pytest.approx(2)
    assert found["fast"]["choosing_share"] == pytest.approx(0.1)
    assert found["fast"]["profile_share"] == pytest.approx(0.05)
    assert found["never"]["reached"] == 0 and found["never"]["time_ratio"] is None
    assert found["never"]["against_reference"] == pytest.approx(-0.5)
    assert found[REFERENCE]["time_ratio"] == 1.0 and found[REFERENCE]["bytes_ratio"] == 1.0


def test_intervals_are_students() -> None:
    values = [0.5, 0.7, 0.6, 0.8]
    expected = 3.182 * np.std(values, ddof=1) / 2
    assert interval(values) == pytest.approx(expected)
    assert interval([0.5]) is None
    # Beyond the table: 11, 31 and 40 values.
    for count, quantile in ((11, 2.2281), (31, 2.0423), (40, 2.0227)):
        many = np.arange(count) / count
        expected = quantile * np.std(many, ddof=1) / np.sqrt(count)
        assert interval(list(many)) == pytest.approx(expected, rel=2e-4)
    assert reached(curve(0.1, 0.2), 0.9) is None


def test_every_task_is_a_scenario_with_every_method() -> None:
    for task in TASKS.values():
        scenario = task_scenario(task)
        names = [method.name for method in scenario.methods]
        assert names == [method_key(name) for name in task.methods]
        assert len(scenario.clients) == sum(count for _, count in task.speeds)
        assert {client.device.slowdown for client in scenario.clients} == {
            s for s, _ in task.speeds
        }


def test_a_longer_run_goes_by_the_clock_of_the_task_that_it_lengthens(folder: Path) -> None:
    longer = replace(SMALL, reference_rounds=4, costs="small")
    profile, choosing = task_costs("longer", longer, folder, "")
    same, as_well = task_costs("small", SMALL, folder, "")
    assert profile.full_step_seconds == same.full_step_seconds and choosing == as_well
    assert not (folder / "longer.json").exists()
    for name, task in CONVERGED.items():
        short = PRETRAINED[task.costs]
        assert name not in PRETRAINED and task.reference_rounds >= 5 * short.reference_rounds
        assert (task.data, task.speeds, task.model) == (short.data, short.speeds, short.model)
        (method,) = task_scenario(task).methods
        assert method.name in {method_key(each) for each in short.methods}


def curve_row(final: float, *points: tuple[float, float, float]) -> dict[str, Any]:
    """A row whose method had sent and received as many bytes at each point."""
    return {
        "final_accuracy": final,
        "curve": [[seconds, sent, sent, accuracy] for seconds, sent, accuracy in points],
    }


def test_the_table_of_converged_runs_says_how_much_sooner_the_others_are_there() -> None:
    rows = {
        f"birds-converged | {REFERENCE} | 0": curve_row(0.8, (50.0, 100, 0.7), (100.0, 200, 0.8)),
        "birds-pretrained | moving cut, solved head | 0": curve_row(
            0.9, (5.0, 10, 0.6), (10.0, 50, 0.85)
        ),
        "birds-pretrained | moving cut, solved head | 1": curve_row(0.9, (5.0, 10, 0.85)),
        "birds-pretrained | fixed cut, solved head | 0": curve_row(0.7, (5.0, 10, 0.7)),
    }
    head, _, *lines = converged_markdown(rows, PRETRAINED)
    assert f"{REFERENCE}: 80.0 %" in head
    assert lines == [
        "| fixed cut, solved head | never |",
        "| moving cut, solved head | 10.0x, 4.0x |",
    ]
    rows[f"birds-converged | {REFERENCE} | 1"] = curve_row(0.8, (50.0, 100, 0.7), (100.0, 200, 0.8))
    _, _, *lines = converged_markdown(rows, PRETRAINED)
    assert lines == [
        "| fixed cut, solved head | never [1 of 2 seeds] |",
        "| moving cut, solved head | 15.0x, 12.0x |",
    ]
    assert converged_markdown({}, PRETRAINED) == ["No cell of this table is measured yet."]


def test_of_a_method_that_was_run_for_longer_the_longer_run_counts() -> None:
    rows = {
        f"signs-converged | {REFERENCE} | 0": curve_row(0.9, (50.0, 100, 0.7), (100.0, 200, 0.9)),
        "signs-pretrained | moving cut, solved head | 0": curve_row(0.8, (10.0, 10, 0.8)),
        "signs-pretrained | fixed cut, solved head | 0": curve_row(0.8, (10.0, 10, 0.8)),
    }
    _, _, *lines = converged_markdown(rows, PRETRAINED)
    assert lines == ["| fixed cut, solved head | never |", "| moving cut, solved head | never |"]
    rows["signs-longer | moving cut, solved head | 0"] = curve_row(
        0.9, (10.0, 10, 0.8), (25.0, 40, 0.9)
    )
    _, _, *lines = converged_markdown(rows, PRETRAINED)
    assert lines == [
        "| fixed cut, solved head | never |",
        "| moving cut, solved head | 4.0x, 5.0x |",
    ]


def test_waiting_reaches_what_it_ends_at() -> None:
    """A curve has four decimals, the final accuracy all of them."""
    waiting = {"final_accuracy": 0.41174, "curve": [[1.0, 4, 4, 0.3], [2.0, 8, 8, 0.4117]]}
    other = {"final_accuracy": 0.5, "curve": [[1.0, 4, 4, 0.5], [2.0, 8, 8, 0.5]]}
    assert sooner_than({0: waiting}, {0: waiting}) == (1, 1, 1.0, 1.0)
    assert sooner_than({0: other}, {0: waiting}) == (1, 1, 2.0, 2.0)


def test_the_last_test_is_compared_seed_by_seed_with_full_steps_under_the_same_head() -> None:
    def ended(at: float) -> dict[str, Any]:
        return {"final_accuracy": 0.1, "curve": [[1.0, 4, 4, 0.2], [2.0, 8, 8, at]]}

    rows = {
        "birds-pretrained | fewer full steps, solved head | 0": ended(0.8),
        "birds-pretrained | fewer full steps, solved head | 1": ended(0.7),
        "birds-pretrained | moving cut, solved head | 0": ended(0.82),
        "birds-pretrained | moving cut, solved head | 1": ended(0.74),
        "birds-pretrained | fixed cut, solved head | 1": ended(0.69),
        "birds-pretrained | fixed cut, solved head | 7": ended(0.0),
    }
    head, _, *lines = ends_markdown(rows, PRETRAINED)
    assert head == "| method | Birds, pretrained MobileNetV2 |"
    # Student's quantile for one degree of freedom, 12.706, times the spread of two over the root of two.
    assert lines == [
        "| fewer full steps, solved head | 75.0 ± 63.5 [2 of 3 seeds] |",
        "| fixed cut, solved head | 69.0 (-1.0) [1 of 3 seeds] |",
        "| moving cut, solved head | 78.0 ± 50.8 (+3.0 ± 12.7) [2 of 3 seeds] |",
    ]
    assert ends_markdown({}, PRETRAINED) == ["No cell of this table is measured yet."]
