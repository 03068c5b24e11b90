"""A registered node of a real fleet that lies, or is silent: the others train, and the run ends as without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from faulty_fleet import QUICK, Outsider, improved, note, rounds_of, scenario_text, wait_until
from test_faults_of_trust import newcomer

from fl_elastic.fleet.local import LocalFleet

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.faults]

LIAR = '''
"""Loaded by every process of one node: what it says of itself, and besides its updates, is lies."""
import json
import fl_elastic.flower.wire as wire
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


def scenario(nodes: int, rounds: int, **changes: Any) -> str:
    return json.dumps(json.loads(scenario_text(nodes, rounds, 2)) | changes)


def test_a_node_that_lies_about_everything_changes_nothing_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIAR)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with LocalFleet(3, config={"threads": 1}, environment=QUICK) as fleet:
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
        checkpoints = list((fleet.folder.results / "checkpoints").glob("*.npz"))
        assert checkpoints and max(each.stat().st_size for each in checkpoints) < 4_000_000
        note("a node that lies about itself", lost="nothing")


def test_a_node_that_never_answers_costs_one_round_timeout() -> None:
    limit = 90.0
    with LocalFleet(2, config={"threads": 1}, environment=QUICK) as fleet:
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
