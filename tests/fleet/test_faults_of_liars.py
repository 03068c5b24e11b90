"""A registered node of a real fleet that lies, or is silent: the others train, and the run ends as without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from faulty_fleet import Outsider, improved, note, rounds_of, scenario_text, wait_until
from test_faults_of_trust import newcomer
from watched_fleet import WatchedFleet

from fl_elastic.monitoring.journal import read_journal

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.faults]

LIAR = '''
"""Loaded by every process of one node: what it says of itself, and besides its updates, is lies."""
import json
import fl_elastic.flower.records as wire
from fl_elastic.flower.capabilities import Capabilities

honest, honest_metrics = wire.train_reply, Capabilities.to_metrics

def train_reply(arrays, num_examples, metrics):
    metrics = dict(metrics)
    metrics["fl_elastic.importance"] = json.dumps({f"evil-{n}": 1.0 for n in range(8000)} | {"x" * 2_000_000: 1.0})
    metrics |= {f"junk{n}": float(n) for n in range(5000)}
    return honest(arrays, num_examples, metrics)

def to_metrics(self):
    return honest_metrics(self) | {"full-step-seconds": 1e-9, "model-bytes": 0.0}

wire.train_reply, Capabilities.to_metrics = train_reply, to_metrics
'''

ONE_LIE = '''
"""Loaded by every process of one node: it lies in the way that a file beside this one names."""
import json
from pathlib import Path
import fl_elastic.flower.client_state as client
import fl_elastic.flower.records as wire
from fl_elastic.flower.capabilities import Capabilities

HERE = Path(__file__).parent
honest_bytes, honest_reply, honest_metrics = client.encode, wire.train_reply, Capabilities.to_metrics

def lie():
    name = (HERE / "lie").read_text()
    (HERE / "told").write_text(name)
    return name

def encode(update, manifest, codec):
    from dataclasses import replace
    from fl_elastic_simulations.benchmarks.bad_clients import LIES
    name = lie()
    once = HERE / "once"
    if name == "enormous" or (name == "enormous, once" and not once.exists()):
        once.touch()
        deltas = {n: d * 0 + 9e29 for n, d in update.deltas.items()}
        return honest_bytes(replace(update, deltas=deltas), manifest, codec)
    told = LIES.get(name)
    return honest_bytes(update, manifest, codec) if told is None else told.attack(update, manifest)

def train_reply(arrays, num_examples, metrics):
    if lie() == "opposite, a hundred million examples":
        num_examples = 100_000_000
    return honest_reply(arrays, num_examples, metrics)

def to_metrics(self):
    told = honest_metrics(self)
    if lie() == "costs of another group" and "group-costs" in told:
        costs = json.loads(told["group-costs"])
        costs["names"] = ["evil"] + costs["names"][1:]
        told["group-costs"] = json.dumps(costs)
    return told

client.encode, wire.train_reply, Capabilities.to_metrics = encode, train_reply, to_metrics
'''

LIES_BY_METHOD = (
    ({"rule": "median"}, 4, ("running variance -5", "opposite, a hundred million examples")),
    ({"rule": "krum"}, 4, ("a tensor left out", "an empty update")),
    ({"rule": "krum", "server": "fedadam"}, 4, ("enormous",)),
    # What a client may do in the first round, a few others have to make good.
    ({"rule": "contributors", "server": "fedadam"}, 10, ("enormous, once",)),
    (
        {"rule": "contributors", "policy": "elastic", "plan": "server"},
        8,
        ("costs of another group",),
    ),
)
"""A method, rounds, and the lies that it is to stand in so many of them."""


def scenario(nodes: int, rounds: int, **changes: Any) -> str:
    return json.dumps(json.loads(scenario_text(nodes, rounds, 2)) | changes)


def test_a_node_that_lies_about_everything_changes_nothing_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIAR)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with WatchedFleet(3, config={"threads": 1}) as fleet:
        name = newcomer(fleet, registered=True, partition=3)
        with Outsider(fleet, name, {"PYTHONPATH": path}):
            wait_until(lambda: name in fleet.online(), 120, "the lying node")
            told = {"deadline": {"quantile": 0.0}}
            run = fleet.submit(
                scenario=scenario(4, 4, **told), results=str(fleet.folder.results),
                node_timeout=60.0, round_timeout=600.0,
            )  # fmt: skip
            assert fleet.wait(run).completed
        lines = rounds_of(fleet)
        assert len(lines) == 4 and improved(fleet)
        honest = [len([n for n in line.get("nodes", {}) if n != name]) for line in lines]
        assert sum(honest) >= 4
        # A step of digits takes no nanosecond.
        assert all((line["deadline_seconds"] or 1.0) > 1e-4 for line in lines)
        assert max(len(json.dumps(line)) for line in lines) < 50_000
        checkpoints = list((fleet.folder.results / "checkpoints").glob("*.state"))
        assert checkpoints and max(each.stat().st_size for each in checkpoints) < 4_000_000
        note("a node that lies about itself", lost="nothing")


@pytest.mark.parametrize(("method", "rounds", "lies"), LIES_BY_METHOD)
def test_lies_about_updates_leave_the_fleet_where_an_honest_node_does(
    tmp_path: Path, method: dict[str, Any], rounds: int, lies: tuple[str, ...]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONE_LIE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    text = scenario(
        5, rounds, methods=["tried"], method={"tried": {"policy": "full"} | method},
        target={"method": "tried", "minus": 0.01}, model={"name": "digits_cnn_bn"},
        fleet=[{"device": "pi_5", "count": 5, "speedup": 2.0}],
    )  # fmt: skip
    with WatchedFleet(4, config={"threads": 1}) as fleet:
        name = newcomer(fleet, registered=True, partition=4)

        def end_of_run(lie: str) -> float:
            (tmp_path / "lie").write_text(lie)
            (tmp_path / "told").unlink(missing_ok=True)
            results = fleet.folder.root / "results" / lie.split()[0]
            run = fleet.submit(
                scenario=text, results=str(results), method="tried",
                node_timeout=60.0, round_timeout=600.0,
            )  # fmt: skip
            assert fleet.wait(run).completed, lie
            assert (tmp_path / "told").read_text() == lie
            lines = read_journal(results / "rounds.jsonl")
            assert [line["round"] for line in lines] == list(range(rounds + 1)), lie
            assert all(line["accepted"] >= 4 for line in lines[1:]), lie
            # Plans of a server go by seconds measured, so that even honest runs end apart: see that it learns.
            assert lines[-1]["accuracy"] > lines[0]["accuracy"] + 0.2, lie
            return float(lines[-1]["accuracy"])

        with Outsider(fleet, name, {"PYTHONPATH": path}):
            wait_until(lambda: name in fleet.online(), 120, "the lying node")
            honest = end_of_run("none")
            for lie in lies:
                lost = honest - end_of_run(lie)
                note(f"a node that lies: {lie}", lost=lost)
                assert "plan" in method or lost < 0.05, lie


def test_a_node_that_never_answers_costs_one_round_timeout() -> None:
    limit = 90.0
    with WatchedFleet(2, config={"threads": 1}) as fleet:
        name = newcomer(fleet, registered=True, partition=2)
        state = fleet.folder.root / "state" / name
        state.mkdir(parents=True, exist_ok=True)
        # Its heartbeat goes on; its client waits for a reader of this pipe, which never comes.
        os.mkfifo(state / "node.log")
        with Outsider(fleet, name, {}):
            wait_until(lambda: name in fleet.online(), 120, "the silent node")
            run = fleet.submit(
                scenario=scenario(3, 5), results=str(fleet.folder.results),
                node_timeout=60.0, round_timeout=limit,
            )  # fmt: skip
            assert fleet.wait(run).completed
        lines = rounds_of(fleet)
        assert [line["accepted"] for line in lines] == [2] * 5 and improved(fleet)
        seconds = [line["round_seconds"] for line in lines]
        assert seconds[0] > limit
        # The second may be given what rounds were seen to take; then nobody waits for it any more.
        assert all(each < limit for each in seconds[2:]), seconds
        note("a node that never answers", lost="one round's limit", round_ended_after=seconds[0])
