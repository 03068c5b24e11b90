"""A deployed federation: a real SuperLink, three real SuperNodes, and one of them dies in training."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_processes import (
    binary,
    end,
    environment,
    free_port,
    listening,
    status_of,
    wait_until,
    with_all_below,
)

from fl_elastic.flower.checkpoint import _KIND
from fl_elastic.state.archive import read_archive

pytestmark = [pytest.mark.deploy, pytest.mark.slow]

PROJECT = """
[project]
name = "tiny-fleet"
version = "1.0.0"

[tool.flwr.app]
publisher = "test"

[tool.flwr.app.components]
serverapp = "tiny_fleet:server_app"
clientapp = "tiny_fleet:client_app"

[tool.flwr.app.config]
results = ""
"""

APP = """
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fl_elastic import Budget
from fl_elastic.flower import Checkpointed, ElasticClient, PartialUpdates
from fl_elastic.update import Manifest, weights_of


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


class Batches:
    def __init__(self, node, asleep):
        self.node, self.asleep = node, asleep

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.node)
        if self.asleep:
            Path(self.asleep).touch()
            time.sleep(600)
        for _ in range(3):
            inputs = torch.randn(8, 6, generator=generator)
            yield inputs, inputs[:, :3].argmax(dim=1)


def client_fn(context):
    torch.set_num_threads(1)
    config = context.node_config
    batches = Batches(int(config["partition-id"]), str(config.get("asleep", "")))
    return ElasticClient(
        build(), batches, batches, budget=Budget(speedup=1.2), state_dir=str(config["state-dir"])
    ).to_client()


client_app = ClientApp(client_fn)
server_app = ServerApp()


@server_app.main()
def main(grid, context):
    results = Path(str(context.run_config["results"]))
    rounds = []
    strategy = PartialUpdates(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=3),
        on_round=lambda record: rounds.append(asdict(record)),
    )
    model = build()
    arrays = {n: Array(a) for n, a in weights_of(model, Manifest.of(model)).items()}
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.5)
    strategy.inner.min_available_nodes = 2
    Checkpointed(strategy, results / "checkpoints").start(
        grid, ArrayRecord(arrays), num_rounds=2, timeout=TIMEOUT
    )
    (results / "rounds.json").write_text(json.dumps(rounds))
"""

ROUND_SECONDS = 90
"""Enough for two clients to start a process each, on a busy machine, for a round of a few steps."""


class Fleet:
    """A SuperLink and three SuperNodes on the loopback; node 0 falls asleep while it trains."""

    def __init__(self, place: Path, app_code: str = APP, *, sleeper: bool = True) -> None:
        self.place = place
        self.sleeper = sleeper
        self.results = place / "results"
        self.asleep = place / "asleep"
        self.port = free_port()
        self.env = environment(place / "home")
        self.started: list[subprocess.Popen[bytes]] = []
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.orphans: list[int] = []
        app = place / "tiny-fleet"
        app.mkdir()
        self.results.mkdir()
        (app / "pyproject.toml").write_text(PROJECT)
        (app / "tiny_fleet.py").write_text(app_code.replace("TIMEOUT", str(ROUND_SECONDS)))
        (place / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "fleet"\n\n[superlink.fleet]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )

    def start(self) -> None:
        self._start(
            "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1",
            "--port", self.port, "--disable-runtime-dependency-installation",
        )  # fmt: skip
        assert wait_until(lambda: listening(self.port), 60), self.log("superlink")
        for node in range(3):
            settings = f'partition-id={node} state-dir="{self.place / f"state{node}"}"'
            if node == 0 and self.sleeper:
                settings += f' asleep="{self.asleep}"'
            self.nodes.append(
                self._start(
                    f"node{node}", "flower-supernode", "--insecure",
                    "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1",
                    "--port", free_port(), "--node-config", settings,
                )
            )  # fmt: skip

    def submit(self) -> str:
        submitted = subprocess.run(
            [
                binary("flwr"), "run", str(self.place / "tiny-fleet"), "fleet", "--format", "json",
                "--run-config", f'results="{self.results}"',
            ],
            env=self.env, cwd=self.place, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        return str(json.loads(submitted.stdout)["run-id"])

    def status(self, run_id: str) -> str:
        return status_of(run_id, ("fleet",), self.env, self.place)

    def kill(self, node: int) -> None:
        """End the SuperNode alone, as a crash would; what it started sleeps on until the test ends."""
        dying = self.nodes[node]
        self.orphans += [pid for pid in with_all_below(dying.pid) if pid != dying.pid]
        dying.send_signal(signal.SIGKILL)
        dying.wait(10)

    def log(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text()[-3000:]

    def close(self) -> None:
        running = [process for process in self.started if process.poll() is None]
        end(with_all_below(*(process.pid for process in running)) + self.orphans)
        for process in running:
            process.wait(20)

    def _start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        words = [binary(str(command[0])), *map(str, command[1:])]
        with (self.place / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                words, env=self.env | {"FLWR_HOME": str(self.place / "home" / name)},
                cwd=self.place, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.started.append(process)
        return process


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_the_run_completes_when_a_node_dies_in_training(fleet: Fleet) -> None:
    run_id = fleet.submit()
    assert wait_until(fleet.asleep.exists, 90), fleet.log("node0") + fleet.log("superlink")
    fleet.kill(0)
    done = fleet.results / "rounds.json"
    assert wait_until(done.exists, 3 * ROUND_SECONDS + 60), fleet.log("superlink")
    assert wait_until(lambda: fleet.status(run_id).startswith("finished"), 30, every=1)
    assert fleet.status(run_id) == "finished:completed"
    rounds = json.loads(done.read_text())
    assert [record["server_round"] for record in rounds] == [1, 2]
    for record in rounds:
        assert len(record["accepted"]) == 2
        assert all(reply["num_examples"] == 24 for reply in record["accepted"])
    # The clients' processes lived for one message each; what they know is on disk.
    assert all(len(list((fleet.place / f"state{node}").iterdir())) == 2 for node in (1, 2))
    stored = sorted((fleet.results / "checkpoints").iterdir())
    assert [path.name for path in stored] == ["round-000001.state", "round-000002.state"]
    one, two = (read_archive(path, _KIND).arrays for path in stored)
    assert not np.array_equal(one["array/2.weight"], two["array/2.weight"])


LASTING = (
    APP.replace(
        "nn.Linear(6, 12), nn.ReLU()", "nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU()"
    )
    .replace("import Checkpointed, ElasticClient,", "import ElasticClient, RoundConfig,")
    .replace('Checkpointed(strategy, results / "checkpoints")', "strategy")
    .replace("num_rounds=2", "num_rounds=3")
    # Nobody dies here, and a busy machine takes its time to start processes.
    .replace("timeout=TIMEOUT", "timeout=150")
    .replace(
        "        on_round=",
        '        config=RoundConfig(read="last", solve_every=2, cut="fixed:2"),\n        on_round=',
    )
)


def rounds_of(fleet: Fleet) -> list[dict[str, Any]]:
    """Run a federation to its end; return the records of its rounds."""
    try:
        fleet.start()
        run_id = fleet.submit()
        done = fleet.results / "rounds.json"
        assert wait_until(done.exists, 12 * ROUND_SECONDS), fleet.log("superlink")
        assert wait_until(lambda: fleet.status(run_id).startswith("finished"), 30, every=1)
        assert fleet.status(run_id) == "finished:completed"
    finally:
        fleet.close()
    found: list[dict[str, Any]] = json.loads(done.read_text())
    return found


def test_heads_and_features_last_from_process_to_process(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LASTING, sleeper=False)
    rounds = rounds_of(fleet)
    assert [(each["server_round"], each["trains"]) for each in rounds] == [
        (0, False), (1, True), (2, True), (2, False), (3, True), (3, False),
    ]  # fmt: skip
    for record in rounds:
        assert len(record["accepted"]) == 3
        trained = {name for reply in record["accepted"] for name in reply["steps"]}
        assert trained == ({"2.weight", "2.bias"} if record["trains"] else set())
        sent = {reply["downlink_bytes"] for reply in record["accepted"]}
        assert (sent == {record["downlink_bytes"]}) == (record["server_round"] == 0)
    assert all((fleet.place / f"state{node}" / "features.db").exists() for node in range(3))


def test_the_cut_lies_where_real_devices_say(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, LASTING.replace("fixed:2", "moving"), sleeper=False)
    rounds = rounds_of(fleet)
    # Asked once there is a head; a cut that was chosen stays.
    assert [(each["server_round"], each["trains"]) for each in rounds] == [
        (0, False), (1, False), (1, True), (2, True), (2, False), (3, True), (3, False),
    ]  # fmt: skip
    assert [each["cut"] for each in rounds[:1]] == [""]
    assert {each["cut"] for each in rounds[1:]} <= {"0", "2"}
    for record in rounds:
        assert len(record["accepted"]) == 3 and not record["rejected"]
        trained = {name for reply in record["accepted"] for name in reply["steps"]}
        above = {"0": {"0.weight", "0.bias", "2.weight", "2.bias"}, "2": {"2.weight", "2.bias"}}
        assert trained == (above[record["cut"]] if record["trains"] else set())
    # Who was asked holds the model, and is not sent it again.
    whole = {reply["downlink_bytes"] for reply in rounds[0]["accepted"]}
    asked, first = ({reply["downlink_bytes"] for reply in each["accepted"]} for each in rounds[1:3])
    assert max(first) < min(asked) and max(asked) < min(whole)


def test_the_head_reads_inside_of_the_model_from_process_to_process(tmp_path: Path) -> None:
    reading = LASTING.replace(', cut="fixed:2"', "").replace('"last"', '"1@flat+input@flat"')
    rounds = rounds_of(Fleet(tmp_path, reading, sleeper=False))
    assert [(each["server_round"], each["trains"]) for each in rounds] == [
        (0, False), (0, False), (1, True), (2, True), (2, False), (3, True), (3, False),
    ]  # fmt: skip
    for record in rounds:
        assert len(record["accepted"]) == 3 and not record["rejected"]
        trained = {name for reply in record["accepted"] for name in reply["steps"]}
        # What lies above the place is not there any more, and nobody trains the head.
        assert trained == ({"body.0.weight", "body.0.bias"} if record["trains"] else set())
    features = {each["head_features"] for each in rounds if each["head_features"]}
    assert features == {12 + 6}


MIXED = (
    APP.replace(
        ").to_client()\n\n\nclient_app",
        """).to_client()


class Stock(NumPyClient):
    def fit(self, parameters, config):
        model, (inputs, targets) = build(), next(iter(Batches(2, "")))
        state = zip(model.state_dict(), parameters)
        model.load_state_dict({name: torch.tensor(array) for name, array in state}, strict=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        return [value.numpy() for value in model.state_dict().values()], len(targets), {}


def mixed(context):
    return Stock().to_client() if int(context.node_config["partition-id"]) == 2 else client_fn(context)


client_app""",
    )
    .replace("ClientApp(client_fn)", "ClientApp(mixed)")
    .replace(
        "from flwr.clientapp import",
        "from flwr.client import NumPyClient\nfrom flwr.clientapp import",
    )
    # The first round asks that client twice, in a process each.
    .replace("timeout=TIMEOUT", "timeout=150")
)


def test_a_stock_client_takes_part_in_a_real_fleet(tmp_path: Path) -> None:
    rounds = rounds_of(Fleet(tmp_path, MIXED, sleeper=False))
    assert [record["server_round"] for record in rounds] == [1, 2]
    for record in rounds:
        assert not record["rejected"] and len(record["accepted"]) == 3
        assert sorted(reply["num_examples"] for reply in record["accepted"]) == [8, 24, 24]
