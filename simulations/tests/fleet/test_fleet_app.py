"""The app of a real fleet, with its nodes in this process: what it trains, writes down and survives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl_elastic.devices.power import PowerSupply
from fl_elastic.errors import FleetError, ScenarioError
from fl_elastic.flower.node_config import NodeConfig
from fl_elastic.monitoring import Journal
from fl_elastic.monitoring.journal import read_journal
from fl_elastic.training import FitReport
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.progress import LoggedProgress
from fl_elastic_simulations.engine.server import Simulation
from fl_elastic_simulations.engine.simulate import simulate
from fl_elastic_simulations.fleet.app import client_app
from fl_elastic_simulations.fleet.server import FleetRun
from fl_elastic_simulations.scenario import Scenario

NODES = 3


@pytest.mark.slow
def test_a_line_of_a_round_knows_its_training_and_what_else_was_asked(tmp_path: Path) -> None:
    scenario_table = json.loads(scenario_of(rounds=2).to_json())
    lasting = {"round_zero": "closed_form", "solve_every": 1, "cut": "fixed:conv4"}
    scenario_table["method"]["full"] |= lasting
    # Nothing jumps, so that no round is taken back.
    scenario_table["training"]["learning_rate"] = 1e-4
    chosen = Scenario.from_json(json.dumps(scenario_table))
    run_of(tmp_path, chosen, method="full").run(grid_of(tmp_path))
    zero, *rounds = journal(tmp_path)
    assert [line["round"] for line in rounds] == [1, 2] and zero["accepted"] == NODES
    for line in rounds:
        assert line["cut"] == "conv4" and line["accepted"] == NODES
        assert all(node["steps"] > 0 for node in line["nodes"].values())
        # The round's own messages, and those of the head that was solved for after it.
        assert line["uplink_bytes"] > sum(n["uplink_bytes"] for n in line["nodes"].values())
        assert line["downlink_bytes"] > 0


def scenario_of(
    rounds: int = 3, epochs: int = 1, methods: Sequence[str] = ("full", "elastic")
) -> Scenario:
    return Scenario.from_json(
        json.dumps(
            {
                "title": "tiny",
                "seeds": [0],
                "methods": list(methods),
                "data": {
                    "dataset": "digits",
                    "partition": "iid",
                    "train_limit": 144,
                    "test_limit": 60,
                },
                "model": {"name": "digits_cnn"},
                "training": {"rounds": rounds, "local_epochs": epochs, "batch_size": 16},
                "fleet": [
                    {"device": "pi_5", "count": 1},
                    {"device": "pi_4b", "count": NODES - 1, "speedup": 3.0},
                ],
            }
        )
    )


def grid_of(
    tmp_path: Path, node_config: Callable[[int], dict[str, Any]] = lambda partition: {}
) -> InProcessGrid:
    return InProcessGrid(
        NODES,
        client_app,
        node_config=lambda partition: (
            {"state-dir": str(tmp_path / f"node{partition}"), "threads": 1} | node_config(partition)
        ),
    )


def run_of(tmp_path: Path, chosen: Scenario, **config: Any) -> FleetRun:
    defaults = {"scenario": chosen.to_json(), "results": str(tmp_path / "results")}
    return FleetRun.of(defaults | config)


def journal(tmp_path: Path) -> list[dict[str, Any]]:
    return read_journal(tmp_path / "results" / "rounds.jsonl")


@pytest.mark.slow
def test_full_training_gives_the_model_of_the_simulation(tmp_path: Path) -> None:
    scenario = scenario_of(2, epochs=2, methods=["full"])
    found = run_of(tmp_path, scenario, method="full").run(grid_of(tmp_path))
    simulation = Simulation(scenario, tmp_path / "simulated")
    expected = simulate(simulation, LoggedProgress(), engine="local")["methods"]["full"]
    assert found["final_accuracy"] == expected["final_accuracy"] > 0.2
    assert found["uplink_bytes_total"] == expected["uplink_bytes"]
    assert found["rounds"] == 2 and found["accepted_total"] == 2 * NODES
    # A short run ends with its last test, whatever it said while it was still learning.
    tested = [line["accuracy"] for line in journal(tmp_path)]
    assert found["final_accuracy"] == tested[-1] != tested[-2]


def test_every_round_is_written_down_with_how_each_node_is_doing(tmp_path: Path) -> None:
    run_of(tmp_path, scenario_of(), method="elastic").run(grid_of(tmp_path))
    lines = journal(tmp_path)
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert 0 <= line["accuracy"] <= 1 and line["round_seconds"] > 0
        assert line["uplink_bytes"] == sum(n["uplink_bytes"] for n in line["nodes"].values())
        assert len(line["nodes"]) == NODES
    # The first node has no limit, the others a third of a full round.
    last = lines[-1]["nodes"]
    assert last["1"]["steps"] == last["1"]["requested_steps"] > last["2"]["steps"] >= 1
    assert last["1"]["coverage"] == 1
    assert last["1"]["disk_free_bytes"] > 0 and last["1"]["peak_memory_bytes"] > 2**20
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert summary["uplink_bytes_total"] == lines[-1]["uplink_bytes_total"]
    own = read_journal(tmp_path / "node1" / "metrics.jsonl")
    assert [line["round"] for line in own] == [1, 2, 3]
    assert own[-1]["steps"] == last["2"]["steps"]


@pytest.mark.slow
def test_seconds_of_a_run_are_all_of_them_however_often_its_journal_began_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fl_elastic_simulations.fleet.server as server

    # A line of a round has more than a kilobyte.
    monkeypatch.setattr(server, "Journal", partial(server.Journal, max_bytes=1000))
    found = run_of(tmp_path, scenario_of(3), method="full").run(grid_of(tmp_path))
    kept = server.Journal(tmp_path / "results" / "rounds.jsonl").entries()
    assert len(kept) < 3
    assert found["rounds"] == 3
    assert found["seconds"] == kept[-1]["seconds_total"]
    assert found["seconds"] > sum(line.get("round_seconds", 0.0) for line in kept)
    # What an earlier run left is not counted with the next one's.
    again = run_of(tmp_path, scenario_of(1), method="full").run(grid_of(tmp_path))
    assert again["rounds"] == 1 and again["accepted_total"] == NODES
    assert again["seconds"] < found["seconds"]


class Stopped(Exception):
    """Stands for a crash of the server."""


@pytest.mark.slow
def test_a_server_that_died_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path / "whole", scenario_of(3), method="full").run(grid_of(tmp_path / "whole"))
    whole = journal(tmp_path / "whole")
    import fl_elastic_simulations.fleet.server as server

    calls, test = [], server.evaluate

    def dies_in_round_2(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise Stopped
        return test(*arguments)

    monkeypatch.setattr(server, "evaluate", dies_in_round_2)
    with pytest.raises(Stopped):
        run_of(tmp_path, scenario_of(3), method="full").run(grid_of(tmp_path))
    monkeypatch.setattr(server, "evaluate", test)
    run_of(tmp_path, scenario_of(3), method="full", resume=True).run(grid_of(tmp_path))
    for name in ("accuracy", "loss"):
        assert journal(tmp_path)[-1][name] == whole[-1][name]
    # What crossed the wire before counts too, but for the line that was not written.
    assert journal(tmp_path)[-1]["accepted_total"] == 2 * NODES
    # Round 2 was merged and checkpointed; its line was not written, and is made up for by what is known of it.
    assert [line["round"] for line in journal(tmp_path)] == [0, 1, 2, 3]
    assert journal(tmp_path)[2]["accuracy"] == whole[2]["accuracy"]
    assert "nodes" not in journal(tmp_path)[2]
    # Started afresh, nothing of it is left.
    run_of(tmp_path, scenario_of(1), method="full").run(grid_of(tmp_path))
    assert [line["round"] for line in journal(tmp_path)] == [0, 1]


@pytest.mark.slow
def test_a_run_that_died_before_its_first_round_does_not_go_on_with_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fl_elastic_simulations.fleet.server as server

    class Stopped(Exception):
        pass

    def dies(*_: object, **__: object) -> None:
        raise Stopped

    run_of(tmp_path, scenario_of(1), method="full").run(grid_of(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(server.Checkpointed, "start", dies)
        with pytest.raises(Stopped):
            run_of(tmp_path, scenario_of(1), method="full").run(grid_of(tmp_path))
    run_of(tmp_path, scenario_of(1), method="full", resume=True).run(grid_of(tmp_path))
    # With the quality of the first weights, which nobody had written down.
    assert [line["round"] for line in journal(tmp_path)] == [0, 1]
    # The earlier model is not lost.
    folders = {path.parent.name for path in tmp_path.rglob("round-000001.state")}
    assert folders == {"checkpoints", "checkpoints.before"}


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"state-dir": ""}, "lacks 'state-dir'"),
        ({"partition-id": 7}, "partition 7"),
        ({"partition-id": "two"}, "partition-id = 'two'"),
        ({"deadline": -1.0}, "deadline = -1.0"),
        ({"state-dir": "/dev/null/state"}, ""),
    ],
)
def test_a_node_that_is_set_up_wrongly_is_named_and_the_others_go_on(
    odd: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    grid = grid_of(tmp_path, lambda partition: odd if partition == 1 else {})
    run_of(tmp_path, scenario_of(1), method="full").run(grid)
    assert len(journal(tmp_path)) == 2
    for line in journal(tmp_path)[1:]:
        if reason:
            assert line["accepted"] == NODES - 1
            assert [each["node"] for each in line["rejections"]] == ["2"]
            assert reason in line["rejections"][0]["reason"]
        else:
            # Without a disk it trains all the same.
            assert line["accepted"] == NODES


def test_a_node_keeps_to_its_own_deadline(tmp_path: Path) -> None:
    # Far too little for one step of anything: the node says so, and takes none.
    grid = grid_of(tmp_path, lambda partition: {"deadline": 1e-5} if partition == 0 else {})
    run_of(tmp_path, scenario_of(3), method="elastic").run(grid)
    lines = read_journal(tmp_path / "node0" / "metrics.jsonl")
    assert lines and all("steps" not in line for line in lines)


def test_node_settings_are_read_and_checked() -> None:
    settings = NodeConfig.of(
        {"state-dir": "/s", "partition-id": 2, "threads": 3, "speedup": 2, "node-name": "pi2"}
    )
    assert settings == NodeConfig(2, Path("/s"), None, "pi2", 3, 2.0, None)
    for wrong in ({"threads": -1}, {"speedup": 0.5}, {"deadline": float("nan")}, {"threads": True}):
        with pytest.raises(FleetError, match="is not a number of at least"):
            NodeConfig.of({"state-dir": "/s"} | wrong)


@pytest.mark.slow
def test_costs_are_measured_again_once_when_the_device_has_drifted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What these rounds really take depends on what else runs here.
    monkeypatch.setattr(FitReport, "drift", 1.0)
    node, scenario = tmp_path / "node1", scenario_of(1)
    run_of(tmp_path, scenario, method="full").run(grid_of(tmp_path))
    profile = next(node.glob("full/0/profile-*.state"))

    def trained_with(*drifts: float, method: str = "full") -> bool:
        """Whether a round after rounds with these drifts measured anew."""
        for drift in drifts:
            Journal(node / "metrics.jsonl").append({"method": method, "drift": drift, "round": 1})
        before = profile.stat().st_mtime_ns
        run_of(tmp_path, scenario, method="full").run(grid_of(tmp_path))
        return profile.stat().st_mtime_ns != before

    assert not trained_with(2.0, 2.0, 1.1)
    assert not trained_with(2.0, 0.4, 2.0)
    assert not trained_with(2.0, 2.0, 2.0, method="elastic")
    assert trained_with(2.0, 2.0, 2.0)
    assert read_journal(node / "metrics.jsonl")[-1]["measured_again"] is True
    # Only what came after counts.
    assert not trained_with(2.0, 2.0)
    monkeypatch.setattr(FitReport, "drift", 3.0)
    assert trained_with(2.0, 2.0, 2.0)
    assert not trained_with(2.0)
    assert trained_with()
    assert trained_with(0.4, 0.4, 0.4)


def test_a_device_on_its_battery_takes_no_part_if_it_is_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fl_elastic.flower.node_app as node_app

    monkeypatch.setattr(node_app, "power_supply", lambda: PowerSupply(on_mains=False, battery=0.25))
    wishes: list[dict[str, Any]] = [{}, {"mains-only": True}, {"least-battery": 0.3}]
    run_of(tmp_path, scenario_of(1), method="full").run(grid_of(tmp_path, wishes.__getitem__))
    line = journal(tmp_path)[-1]
    assert list(line["nodes"]) == ["1"]
    reasons = {each["node"]: each["reason"] for each in line["rejections"]}
    assert "not on mains" in reasons["2"] and "25 %, its least is 30 %" in reasons["3"]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"results": "relative"}, FleetError, "absolute"),
        ({"scenario": "{"}, ScenarioError, "JSON"),
        ({"method": "nobody"}, ScenarioError, "known are full, elastic"),
        ({"round-timeout": 0}, FleetError, "round-timeout"),
        ({"node-timeout": "soon"}, FleetError, "node-timeout"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(
    config: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run_of(tmp_path, scenario_of(), **config)


def test_without_a_name_the_first_method_that_selects_is_run(tmp_path: Path) -> None:
    assert run_of(tmp_path, scenario_of()).method.name == "elastic"
