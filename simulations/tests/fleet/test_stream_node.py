"""A node of a fleet that learns from a stream: its learner and its rounds meet on disk, in real processes too."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_processes import binary, environment, wait_until

from fl_elastic.budget import Budget
from fl_elastic.errors import StreamError
from fl_elastic.flower.node_config import NodeConfig
from fl_elastic.flower.records import PACKED
from fl_elastic.flower.stream_client import StreamClient
from fl_elastic.monitoring.journal import read_journal
from fl_elastic.named_models import build_model
from fl_elastic.streaming import SampleStore, StreamLearner, StreamOptions, Trigger
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.update import Manifest, weights_of
from fl_elastic.update.model_wire import encode_weights
from fl_elastic_simulations.data.datasets import load_dataset
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.fleet.app import client_app
from fl_elastic_simulations.fleet.node import ScenarioNode
from fl_elastic_simulations.fleet.server import FleetRun
from fl_elastic_simulations.scenario import Scenario

NODES = 3


def scenario(rounds: int = 3) -> Scenario:
    return Scenario.from_json(
        json.dumps(
            {
                "title": "streams", "seeds": [0], "methods": ["full"],
                "data": {"dataset": "digits", "partition": "iid", "train_limit": 240},
                "model": {"name": "digits_cnn"},
                "training": {"rounds": rounds, "local_epochs": 2, "batch_size": 16},
                "fleet": [{"device": "pi_5", "count": NODES}],
            }
        )
    )  # fmt: skip


def learner_of(folder: Path, number: int) -> StreamLearner:
    store = SampleStore(folder / "samples.db", 2**20)
    return StreamLearner(
        build_model("digits_cnn", (1, 8, 8), 10, 0), store, budget=Budget(), policy="full",
        optimizer_fn=lambda parameters: torch.optim.Adam(parameters, lr=1e-3), seed=number,
        detector="none", trigger=Trigger(40, None), state_dir=folder,
        options=StreamOptions(steps=5, training=TrainerOptions(timing=Timing(closed_loop=False))),
    )  # fmt: skip


@pytest.mark.slow
def test_nodes_with_a_stream_take_part_beside_one_without(tmp_path: Path) -> None:
    data = load_dataset("digits")
    learners = [learner_of(tmp_path / f"stream{number}", number) for number in range(2)]
    for number, learner in enumerate(learners):
        for place in range(number * 120, number * 120 + 120):
            learner.observe(data.train_x[place], int(data.train_y[place]))
        learner.save()

    def settings(partition: int) -> dict[str, Any]:
        own: dict[str, Any] = {"state-dir": str(tmp_path / f"node{partition}"), "threads": 1}
        if partition < 2:
            own |= {"stream-state-dir": str(tmp_path / f"stream{partition}"), "joining": "replace"}
        return own

    grid = InProcessGrid(NODES, client_app, node_config=settings)
    config = {"scenario": scenario().to_json(), "results": str(tmp_path / "results")}
    summary = FleetRun.of(config).run(grid)
    assert summary["accepted_total"] == 3 * NODES
    lines = read_journal(tmp_path / "node0" / "metrics.jsonl")
    assert [line["samples_since_round"] for line in lines] == [120, 0, 0]
    assert all(line["store_bytes"] > 10_000 and line["joined_share"] == 1 for line in lines)
    assert "store_bytes" not in read_journal(tmp_path / "node2" / "metrics.jsonl")[0]
    for learner in learners:
        assert learner.apply_round_result() and learner.rounds.taken == 1
        learner.close()
        learner.store.close()


def test_where_the_stream_is_says_the_node_alone(tmp_path: Path) -> None:
    told = {"stream-state-dir": "/elsewhere", "joining": "replace", "stream_dir": "/elsewhere"}
    config = {"scenario": scenario(1).to_json(), "method": "full", "seed": 0, **told}
    node = ScenarioNode(NodeConfig(0, tmp_path / "state", threads=1), config)
    assert not isinstance(node.client(), StreamClient)
    own = NodeConfig.of({"state-dir": "/s", "stream-state-dir": "/t", "joining": "replace"})
    assert own.stream_dir == Path("/t") and own.joining == "replace"
    plain = NodeConfig.of({"state-dir": "/s"})
    assert plain.stream_dir is None and plain.joining == "measured"


def test_a_node_without_a_learner_is_named(tmp_path: Path) -> None:
    settings = NodeConfig(0, tmp_path / "state", threads=1, stream_dir=tmp_path / "none")
    config = {"scenario": scenario(1).to_json(), "method": "full", "seed": 0}
    with pytest.raises(StreamError, match="nothing was learned"):
        ScenarioNode(settings, config).client()


@pytest.mark.deploy
@pytest.mark.slow
def test_a_service_takes_up_what_rounds_in_another_process_leave(tmp_path: Path) -> None:
    data, waiting = load_dataset("digits"), tmp_path / "arriving"
    state = tmp_path / "state"
    waiting.mkdir()

    def arrive(name: str, start: int, count: int) -> None:
        rows = slice(start, start + count)
        np.savez(waiting / f"{name}.part", x=data.train_x[rows], y=data.train_y[rows])
        (waiting / f"{name}.part.npz").rename(waiting / f"{name}.npz")

    arrive("a", 0, 300)
    command = [
        binary("fl-elastic"), "stream", "--source", f"dir:{waiting}", "--follow", "--json",
        "--model", "digits_cnn", "--input", "1,8,8", "--outputs", "10", "--state-dir", str(state),
        "--policy", "full", "--every", "50", "--steps", "10",
    ]  # fmt: skip
    service = subprocess.Popen(
        command, env=environment(tmp_path / "home"), stdout=subprocess.PIPE, text=True
    )
    try:
        assert wait_until(lambda: (waiting / "done" / "a.npz").exists(), 120)
        model = build_model("digits_cnn", (1, 8, 8), 10, 7)
        manifest = Manifest.of(model)
        packed = np.frombuffer(encode_weights(weights_of(model, manifest), manifest), np.uint8)
        client = StreamClient(
            build_model("digits_cnn", (1, 8, 8), 10, 0), state, budget=Budget(), policy="full",
            joining="measured", steps=5,
            optimizer_fn=lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
        )  # fmt: skip
        inbox = state / "inbox"
        for number in range(3):
            _, _, metrics = client.fit([packed], {PACKED: True})
            assert "fl_elastic.error" not in metrics, metrics
            # It ticks while nothing comes.
            assert wait_until(lambda: inbox.exists() and not any(inbox.iterdir()), 30), number
        arrive("b", 300, 100)
        assert wait_until(lambda: (waiting / "done" / "b.npz").exists(), 60)
        time.sleep(0.5)
        service.terminate()
        summary = json.loads(service.communicate(timeout=60)[0])
    finally:
        service.kill()
        service.wait()
    assert summary["observed"] == 400 and summary["prequential_accuracy"] > 0.5
    learner = learner_of(state, 0)
    assert learner.rounds.taken == 3
    learner.store.close()
