"""Simulated fleets under a deadline: who waits, who drops, who fits, and a thousand clients in one process."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from choosing_costs import ran, steady, with_costs
from flwr.app import ArrayRecord, Message

from fl_elastic.errors import ScenarioError
from fl_elastic.flower.server_plan import _sending
from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.engine import client as simulated_client
from fl_elastic_simulations.engine import server as simulated_server
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.progress import LoggedProgress
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation, run_methods
from fl_elastic_simulations.engine.simulate import simulate
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario import Scenario

SLOWEST = 4.0
STEPS = 6
TABLE: dict[str, Any] = {
    "title": "small",
    "seeds": [0],
    "data": {
        "dataset": "digits",
        "partition": "dirichlet",
        "layout": "correlated",
        "train_limit": 120,
        "test_limit": 30,
    },
    "model": {"name": "digits_cnn"},
    "training": {"rounds": 3, "batch_size": 4, "learning_rate": 0.03, "local_steps": STEPS},
    "deadline": {"quantile": 0.0},
    "fleet": [
        {"name": "fast", "device": "laptop", "slowdown": 1.0, "count": 1},
        {"name": "slow", "device": "laptop", "slowdown": SLOWEST, "count": 1},
    ],
    "methods": ["wait", "drop", "fewer", "elastic"],
    "method": {
        "wait": {"policy": "full", "stragglers": "wait"},
        "drop": {"policy": "full", "stragglers": "drop"},
        "fewer": {"policy": "full", "budgeted": True},
        "elastic": {"policy": "elastic"},
    },
}
BANDWIDTH = 1e9


def scenario(**changes: Any) -> Scenario:
    table = json.loads(json.dumps(TABLE | changes))
    for entry in table["fleet"]:
        entry |= {
            "uplink_bytes_per_second": BANDWIDTH,
            "downlink_bytes_per_second": BANDWIDTH,
        }
    return Scenario.from_json(json.dumps(table))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return steady(measure_profile(scenario(), None))


@pytest.fixture(autouse=True)
def same_costs(profile: CostProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    with_costs(monkeypatch, profile)


@pytest.fixture(scope="module")
def cells(profile: CostProfile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunResult]:
    folder = tmp_path_factory.mktemp("cells")
    with pytest.MonkeyPatch.context() as patch:
        with_costs(patch, profile)
        return ran(scenario(), folder)


def per_round(cell: RunResult) -> float:
    return cell.history[-1]["simulated_seconds"] / cell.history[-1]["round"]


def test_waiting_takes_the_slowest_clients_time(
    cells: dict[str, RunResult], profile: CostProfile
) -> None:
    full = STEPS * profile.full_step_seconds
    assert per_round(cells["wait"]) == pytest.approx(SLOWEST * full, rel=0.05)
    for method in ("drop", "fewer"):
        assert per_round(cells[method]) == pytest.approx(full, rel=0.05)
    assert per_round(cells["elastic"]) <= 1.05 * full


def test_dropping_leaves_the_slow_out_and_the_others_do_not(cells: dict[str, RunResult]) -> None:
    assert {name: cell.rejected for name, cell in cells.items()} == {
        "wait": 0, "drop": 3, "fewer": 0, "elastic": 0,
    }  # fmt: skip
    assert max(cells["drop"].coverage["slow"][-1]) == 0.0
    assert min(cells["fewer"].coverage["slow"][-1]) == 1.0


def test_fewer_full_steps_are_as_many_as_fit(cells: dict[str, RunResult]) -> None:
    shares = {(step.device, step.share) for step in cells["fewer"].steps}
    assert shares == {("fast", 1.0), ("slow", 1 / STEPS)}


def test_costs_that_another_release_measured_are_the_clock_all_the_same(
    cells: dict[str, RunResult],
    tmp_path: Path,
    profile: CostProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that estimated them anew would take more or fewer steps as this host is busy."""
    other = replace(profile, key=replace(profile.key, torch_version="0.9", device="another"))
    monkeypatch.setattr(simulated_server, "measure_profile", lambda *_, **__: other)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("costs were estimated anew")

    monkeypatch.setattr("fl_elastic.profiling.estimate.estimate_profile", refuse)
    found = ran(scenario(methods=["fewer", "elastic"]), tmp_path)
    for method, cell in found.items():
        assert [row["loss"] for row in cell.history] == [
            row["loss"] for row in cells[method].history
        ]


def test_a_run_ends_with_its_simulated_time(tmp_path: Path, profile: CostProfile) -> None:
    limit = 2.5 * STEPS * profile.full_step_seconds
    training = TABLE["training"] | {"rounds": 100, "simulated_seconds": limit, "evaluate_every": 50}
    found = ran(scenario(training=training, methods=["fewer"]), tmp_path)["fewer"]
    # Tested at the start, and after the round in which the time was up.
    assert [row["round"] for row in found.history] == [0, 3]
    assert found.history[-1]["simulated_seconds"] >= limit


@pytest.mark.slow
def test_the_local_engine_gives_a_summary(tmp_path: Path) -> None:
    made = scenario(methods=["wait", "elastic"])
    summary = simulate(Simulation(made, tmp_path), LoggedProgress(), engine="local")
    assert list(summary["methods"]) == ["wait", "elastic"]
    assert {device["device"] for device in summary["devices"]} == {"fast", "slow"}
    with pytest.raises(ScenarioError, match="'lokal'"):
        simulate(Simulation(made, tmp_path), LoggedProgress(), engine="lokal")


def test_a_deadline_is_either_seconds_or_a_quantile() -> None:
    for wrong in ({}, {"seconds": 1.0, "quantile": 0.5}):
        with pytest.raises(ScenarioError, match="either seconds or a quantile"):
            scenario(deadline=wrong)


@pytest.mark.slow
def test_a_thousand_clients_take_the_memory_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = [
        {"name": "fast", "device": "laptop", "slowdown": 1.0, "count": 500},
        {"name": "slow", "device": "laptop", "slowdown": SLOWEST, "count": 500},
    ]
    data = {"dataset": "digits", "partition": "iid", "min_examples": 1}
    training = TABLE["training"] | {"rounds": 1, "local_steps": 5, "client_fraction": 0.1}
    made = scenario(fleet=fleet, data=data, training=training, methods=["fewer"])
    alive: list[int] = []
    trained = count()

    class Counting(InProcessGrid):
        def _answer(self, message: Message, *arguments: Any) -> Any:
            if message.metadata.message_type == "train" and next(trained) % 20 == 0:
                # What waits for the collector, being in a cycle, is not held on to.
                gc.collect()
                alive.append(sum(type(each) is ArrayRecord for each in gc.get_objects()))
            return super()._answer(message, *arguments)

    grid = Counting(len(made.clients), simulated_client_app())
    (cell,), _ = run_methods(Simulation(made, tmp_path), grid, LoggedProgress())
    assert cell.rejected == 0 and len(cell.steps) == 100
    # Replies are merged as they come: no more arrays are alive after 100 than after the first few.
    assert len(alive) == 5 and max(alive[1:]) <= alive[0] + 3


def test_what_sending_a_group_takes_is_the_same_to_a_server_plan_as_to_the_round(
    profile: CostProfile,
) -> None:
    table = json.loads(json.dumps(TABLE))
    table["method"]["small"] = {"policy": "elastic", "codec": "int8"}
    table["methods"] = [*table["methods"], "small"]
    made = scenario(**table)
    config = {"scenario": made.to_json(), "seed": 0}
    known = {
        name: simulated_client._Role.of(config | {"method": name}, 0, {"": profile}).capabilities()
        for name in ("elastic", "small")
    }
    whole, small = (float(_sending(each, each.groups).sum()) for each in known.values())  # type: ignore[arg-type]
    assert small == pytest.approx(whole / 4, rel=1e-2)
    for each in known.values():
        assert each.groups is not None
        assert sum(each.groups.sent_bytes) == pytest.approx(each.model_bytes)
