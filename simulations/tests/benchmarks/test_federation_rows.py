"""The federation benchmark: every method runs in a small fleet, and its table is what the cells say."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_ones import slow_unless

from fl_elastic.errors import ScenarioError
from fl_elastic.profiling import save_profile
from fl_elastic_simulations.benchmarks import across_rounds
from fl_elastic_simulations.benchmarks.benchmark import Request, markdown
from fl_elastic_simulations.benchmarks.federation import (
    Federation,
    federation_cell,
    row_of,
    sooner,
    task_costs,
)
from fl_elastic_simulations.benchmarks.federation_methods import METHODS, OURS, REFERENCE
from fl_elastic_simulations.benchmarks.federation_tasks import (
    CONVERGED,
    LARGER,
    PRETRAINED,
    TASKS,
    FederationTask,
    bandwidth_of,
    method_key,
    task_scenario,
)
from fl_elastic_simulations.benchmarks.intervals import interval
from fl_elastic_simulations.engine.run_result import RunResult

STEPS = 8
SMALL = FederationTask(
    title="Digits",
    data={
        "dataset": "digits",
        "partition": "dirichlet",
        "alpha": 0.5,
        "layout": "correlated",
        "train_limit": 120,
        "test_limit": 40,
    },
    model="digits_cnn",
    speeds=((1.0, 1), (3.0, 1)),
    training={"local_steps": STEPS, "batch_size": 4, "learning_rate": 0.05},
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
    return federation_cell("small", SMALL, method, 0, folder, "")


PAYS = {"fl_elastic", "fl_elastic, int8", "fedel", "fedel, free probe, our server"} | {
    f"{name}, our server" for name in ("last layers", "random layers", "timelyfl")
}


def test_a_new_model_counts_from_when_it_was_there_even_if_it_is_of_the_same_round() -> None:
    run = RunResult("head, then steps", 0)
    spent = {"uplink_bytes": 1.0, "downlink_bytes": 1.0}
    for number, accuracy, since, at in [
        (0, 0.1, 0.0, 0.0), (0, 0.5, 1.5, 2.0), (0, 0.5, 1.5, 4.0), (1, 0.6, 5.2, 6.0), (2, 0.7, 7.9, 8.0),
    ]:  # fmt: skip
        costs = spent | {"simulated_seconds": at}
        run.evaluated(number, accuracy, 1.0, spent=costs if at else None, since=since)
    assert [point[0] for point in row_of(run)["curve"]] == [1.5, 5.2, 8.0]


# One that waits, a peer and ours; the others are among the slow tests.
FIRST = {"fedavg, waiting, our server", "timelyfl, our server", OURS}


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
    # Forty tests at equal times, of which those are kept that are better than all before, and the last. A point has
    # the time when its model was there, which is after the test before, and is as exact as rows are: four decimals.
    step = row["simulated_seconds"] / 40
    tests = [math.ceil((seconds - 7e-5) / step) for seconds, *_ in row["curve"]]
    assert tests == sorted(set(tests)) and tests[-1] == 40
    accuracies = [point[-1] for point in row["curve"][:-1]]
    assert accuracies == sorted(set(accuracies))
    assert row["curve"][-1][0] == pytest.approx(row["simulated_seconds"], abs=1e-3)
    assert row["curve"][-1][1:3] == [row["uplink_bytes"], row["downlink_bytes"]]
    assert row["uplink_bytes"] > 0 and row["downlink_bytes"] > 0
    waits = method.startswith("fedavg, waiting")
    assert (row["rounds"] == 2) == waits
    assert (row["choosing_seconds"] > 0) == (method in PAYS)
    # Who keeps to a cut has to know where it lies.
    assert (row["profile_seconds"] > 0) == (method in PAYS or "cut" in METHODS[method])
    assert row["choosing_seconds"] + row["profile_seconds"] < row["client_seconds"]


@pytest.mark.parametrize(
    "method", slow_unless(FIRST.__contains__, [name for name in METHODS if "waiting" not in name])
)
def test_no_round_takes_longer_than_its_deadline(folder: Path, method: str) -> None:
    """The fastest class's full round, and the way down to the slowest; exits make FedEL's model larger."""
    row, profile = cell(folder, method), task_costs("small", SMALL, folder, "")[0]
    bandwidth = bandwidth_of(SMALL, profile)
    deadline = STEPS * profile.full_step_seconds + float(profile.parameter_bytes.sum()) / bandwidth
    down = row["downlink_bytes"] / row["rounds"] / 2 / (2 * bandwidth)
    assert row["simulated_seconds"] / (row["rounds"] + 1) <= (deadline + down) * 1.01


@pytest.mark.parametrize("method", slow_unless(OURS.__eq__, [OURS, "fedel"]))
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
        federation_cell("small", later, "later", 0, folder, "")


def test_cases_are_those_that_are_asked_for(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = replace(SMALL, methods={name: METHODS[name] for name in (REFERENCE, OURS)})
    monkeypatch.setattr(Federation, "tasks", {"small": two})
    shutil.copytree(folder, tmp_path / "federation", dirs_exist_ok=True)
    asked = Request(tmp_path / "table", tasks=["small"], methods=[OURS], seeds=[3])
    assert list(Federation().cases(asked, {})) == [f"small | {OURS} | 3"]
    assert len(Federation().cases(Request(tmp_path / "table"), {})) == 2 * 3
    with pytest.raises(ScenarioError, match=r"task 'smal'.*did you mean 'small'"):
        Federation().cases(replace(asked, tasks=["smal"]), {})
    with pytest.raises(ScenarioError, match=r"method 'fl_elasti'.*did you mean 'fl_elastic'"):
        Federation().cases(replace(asked, methods=["fl_elasti"]), {})


def test_a_table_has_ratios_to_the_references_own_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(final: float, *points: tuple[float, int, int, float], choosing: float = 0.0) -> Any:
        return {
            "final_accuracy": final, "curve": [list(point) for point in points],
            "client_seconds": 50.0, "choosing_seconds": choosing, "profile_seconds": choosing / 2,
        }  # fmt: skip

    never = "fedel"
    task = replace(SMALL, methods={name: METHODS[name] for name in (REFERENCE, OURS, never)})
    monkeypatch.setattr(Federation, "columns", {"t": task})
    rows = {
        f"t | {REFERENCE} | 0": row(0.6, (3.0, 30, 90, 0.3), (6.0, 60, 180, 0.6)),
        f"t | {OURS} | 0": row(0.6, (1.0, 10, 50, 0.2), (2.0, 20, 100, 0.6), choosing=5.0),
        f"t | {never} | 0": row(0.1, (1.0, 10, 50, 0.1)),
        f"other | {OURS} | 0": row(0.9, (1.0, 10, 50, 0.9)),
    }
    tables = Federation().tables(rows)
    # The first test of 0.6 is at 6 and at 2; 60 + 180 bytes against 20 + 100.
    assert tables["accuracy"]["Digits"].to_dict() == {
        REFERENCE: "60.0 (1.0x, 1.0x, 1.0x) [1 of 3 seeds]",
        OURS: "60.0 (3.0x, 3.0x, 2.0x) [1 of 3 seeds]",
        never: "10.0 (never) [1 of 3 seeds]",
    }
    assert tables["charges"].loc[OURS, "Digits"] == "5 s (10.0 %), 2.5 s (5.0 %)"
    assert tables["charges"].loc[REFERENCE, "Digits"] == "none"


def test_intervals_are_students() -> None:
    values = [0.5, 0.7, 0.6, 0.8]
    assert interval(values) == pytest.approx(3.182 * np.std(values, ddof=1) / 2, rel=1e-3)
    assert interval([0.5]) is None


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


@pytest.mark.slow
def test_a_task_with_costlier_data_gets_the_time_of_the_task_that_it_is_compared_with(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    profile, choosing = task_costs("small", SMALL, folder, "")
    seconds = {
        name: 2 * getattr(profile, name)
        for name in ("node_update_seconds", "node_path_seconds", "optimizer_seconds",
                     "forward_seconds", "fixed_seconds")
    }  # fmt: skip
    costlier = replace(profile, **seconds)
    assert costlier.full_step_seconds == pytest.approx(2 * profile.full_step_seconds)
    save_profile(costlier, tmp_path / "costlier.json")
    choosing.save(tmp_path / "costlier-choosing.json")
    rounds = {
        time_of: federation_cell(
            "costlier",
            replace(SMALL, reference_rounds=4, time_of=time_of),
            REFERENCE,
            0,
            tmp_path,
            "",
        )["rounds"]
        for time_of in ("", "small")
    }
    assert rounds == {"": 4, "small": 2}
    for task in LARGER.values():
        same = PRETRAINED[task.time_of]
        assert (task.speeds, task.training, task.model) == (same.speeds, same.training, same.model)


def curve_row(final: float, *points: tuple[float, float, float]) -> dict[str, Any]:
    """A row whose method had sent and received as many bytes at each point."""
    return {
        "final_accuracy": final,
        "curve": [[seconds, sent, sent, accuracy] for seconds, sent, accuracy in points],
    }


def lines_of(table: str, rows: dict[str, Any]) -> list[str]:
    return markdown(across_rounds.BENCHMARK.tables(rows)[table]).splitlines()


def test_the_table_of_converged_runs_says_how_much_sooner_the_others_are_there() -> None:
    rows = {
        f"birds-converged | {REFERENCE} | 0": curve_row(0.8, (50.0, 100, 0.7), (100.0, 200, 0.8)),
        "birds-pretrained | moving cut, solved head | 0": curve_row(
            0.9, (5.0, 10, 0.6), (10.0, 50, 0.85)
        ),
        "birds-pretrained | moving cut, solved head | 1": curve_row(0.9, (5.0, 10, 0.85)),
        "birds-pretrained | fixed cut, solved head | 0": curve_row(0.7, (5.0, 10, 0.7)),
    }
    head, _, *lines = lines_of("converged", rows)
    assert f"{REFERENCE}: 80.0 %" in head
    assert lines == [
        "| fixed cut, solved head | never |",
        "| moving cut, solved head | 10.0x, 4.0x |",
    ]
    rows[f"birds-converged | {REFERENCE} | 1"] = curve_row(0.8, (50.0, 100, 0.7), (100.0, 200, 0.8))
    _, _, *lines = lines_of("converged", rows)
    assert lines == [
        "| fixed cut, solved head | never [1 of 2 seeds] |",
        "| moving cut, solved head | 15.0x, 12.0x |",
    ]


def test_of_a_method_that_was_run_for_longer_the_longer_run_counts() -> None:
    rows = {
        f"signs-converged | {REFERENCE} | 0": curve_row(0.9, (50.0, 100, 0.7), (100.0, 200, 0.9)),
        "signs-pretrained | moving cut, solved head | 0": curve_row(0.8, (10.0, 10, 0.8)),
        "signs-pretrained | fixed cut, solved head | 0": curve_row(0.8, (10.0, 10, 0.8)),
    }
    _, _, *lines = lines_of("converged", rows)
    assert lines == ["| fixed cut, solved head | never |", "| moving cut, solved head | never |"]
    rows["signs-longer | moving cut, solved head | 0"] = curve_row(
        0.9, (10.0, 10, 0.8), (25.0, 40, 0.9)
    )
    _, _, *lines = lines_of("converged", rows)
    assert lines == [
        "| fixed cut, solved head | never |",
        "| moving cut, solved head | 4.0x, 5.0x |",
    ]


def test_waiting_reaches_what_it_ends_at() -> None:
    """A curve has four decimals, the final accuracy all of them."""
    waiting = {"final_accuracy": 0.41174, "curve": [[1.0, 4, 4, 0.3], [2.0, 8, 8, 0.4117]]}
    other = {"final_accuracy": 0.5, "curve": [[1.0, 4, 4, 0.5], [2.0, 8, 8, 0.5]]}
    assert sooner(waiting, waiting) == (1.0, 1.0, 1.0)
    assert sooner(other, waiting) == (2.0, 2.0, 2.0)


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
    head, _, *lines = lines_of("ends", rows)
    assert head == "| method | Birds, pretrained MobileNetV2 |"
    # Student's quantile for one degree of freedom, 12.706, times the spread of two over the root of two.
    assert lines == [
        "| fewer full steps, solved head | 75.0 ± 63.5 [2 of 3 seeds] |",
        "| fixed cut, solved head | 69.0 (-1.0) [1 of 3 seeds] |",
        "| moving cut, solved head | 78.0 ± 50.8 (+3.0 ± 12.7) [2 of 3 seeds] |",
    ]
