"""Scenarios and apps on a Ray cluster of two nodes with folders of their own, one of which may be killed."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from choosing_costs import steady, with_costs
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from real_processes import free_port

from fl_elastic.errors import ScenarioError
from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.engine.progress import Progress
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation
from fl_elastic_simulations.engine.simulate import simulate
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario import Scenario
from fl_elastic_simulations.unequal import Fleet, UnequalGrid, measuring_mod
from fl_elastic_simulations.unequal.fleet import CostSection, FleetSection

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

RAY = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", "--block",
       "--object-store-memory=100000000"]  # fmt: skip
SECONDS_TO_START = 60
# A namespace for mounts and another for the host's name take a privilege.
APART = ["unshare", "--mount", "--uts"]
ALLOWED = subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


def scenario(rounds: int, client_fraction: float = 1.0) -> Scenario:
    table: dict[str, Any] = {
        "title": "apart", "seeds": [0], "methods": ["elastic"], "target": {"method": "elastic"},
        "data": {"dataset": "digits", "train_limit": 320, "test_limit": 60},
        "model": {"name": "digits_cnn"},
        "training": {"rounds": rounds, "batch_size": 16, "client_fraction": client_fraction},
        "method": {"elastic": {"policy": "elastic", "codec": "int8"}},
        "fleet": [{"device": "laptop", "count": 2},
                  {"device": "pi_4b", "count": 2, "speedup": 2.0}],
    }  # fmt: skip
    return Scenario.from_json(json.dumps(table))


@pytest.fixture
def same_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the server measures."""
    profile: CostProfile = steady(measure_profile(scenario(1), None))
    with_costs(monkeypatch, profile)


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all that it starts, in a group of its own."""
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


@pytest.fixture
def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """An output folder that the second node sees as an empty one of its own, and that node."""
    import ray

    if not ALLOWED:
        pytest.skip("nodes can only be given folders of their own by who may mount")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    address, output = f"127.0.0.1:{free_port()}", tmp_path / "out"
    output.mkdir()
    mine = shlex.join([*RAY, f"--address={address}", "--node-ip-address=127.0.0.2"])
    there = f"hostname second; mount -t tmpfs none {output} && exec {mine}"
    # Names of sockets have to be short.
    with (
        tempfile.TemporaryDirectory(prefix="ray") as folder,
        started(*RAY, "--head", f"--port={address.split(':')[1]}", "--include-dashboard=false",
                "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"),
    ):  # fmt: skip
        wait_for(address, 1)
        with started(*APART, "sh", "-c", there) as second:
            wait_for(address, 2)
            monkeypatch.setenv("RAY_ADDRESS", address)
            yield output, second
            ray.shutdown()


def wait_for(address: str, nodes: int) -> None:
    status = [RAY[0], "status", f"--address={address}"]
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end:
        said = subprocess.run(status, capture_output=True, text=True, check=False).stdout
        if said.count(" 1 node_") == nodes:
            return
        time.sleep(0.5)
    raise TimeoutError(f"no cluster of {nodes} nodes:\n{said}")


def result(folder: Path) -> RunResult:
    return RunResult.from_json((folder / "cells" / "elastic-0.json").read_text())


def planned(cell: RunResult) -> dict[str, Any]:
    """All of a result but where and in which order its steps were taken, and how long that really took."""
    found = asdict(cell)
    steps = sorted(json.dumps({**each, "seconds": 0.0}) for each in found["steps"])
    return found | {"steps": steps, "machines": {}}


@pytest.mark.usefixtures("same_costs")
def test_both_nodes_train_and_the_result_is_that_of_one_process(
    cluster: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    output, _ = cluster
    # Half of the clients in each round: the seed draws the same ones on either engine.
    made = scenario(rounds=4, client_fraction=0.5)
    simulate(Simulation(made, output), Progress())
    apart = result(output)
    assert set(apart.machines) == {socket.gethostname(), "second"}
    assert sum(apart.machines.values()) == 4 * len(made.clients) // 2
    simulate(Simulation(made, tmp_path / "local"), Progress(), engine="local")
    assert planned(apart) == planned(result(tmp_path / "local"))


def averaged_on_unequal_devices(folder: Path) -> tuple[set[str], str, float]:
    """Run an app of one's own with Flower's strategy; return its machines, the rows of the layer, and the model."""
    costs = {"train": CostSection(seconds=1.0), "evaluate": CostSection()}
    link = {"uplink_bytes_per_second": 1e12, "downlink_bytes_per_second": 1e12}
    fleet = Fleet(tuple(FleetSection("laptop", slowdown=s, **link) for s in (8, 1, 4, 2)), costs)  # type: ignore[arg-type]
    # Local functions travel by value: the other node does not find this file.
    client, server = ClientApp(mods=[measuring_mod]), ServerApp()
    hosts: set[str] = set()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        import platform
        import time

        import numpy
        from flwr.app import Array

        # Long enough that no node answers everything before the other has begun.
        time.sleep(0.5)
        partition = int(context.node_config["partition-id"])
        model = message.content.array_records["arrays"]["weight"].numpy() + partition
        content = RecordDict({
            "arrays": ArrayRecord({"weight": Array(numpy.asarray(model))}),
            "metrics": MetricRecord({"num-examples": 10 + partition}),
            "host": ConfigRecord({"name": platform.node()}),
        })  # fmt: skip
        return Message(content, reply_to=message)

    class Noting(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            hosts.update(str(each.content.pop("host")["name"]) for each in replies)
            return super().aggregate_train(server_round, replies)

    found: list[float] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        unequal = UnequalGrid(grid, fleet, min_available_nodes=4)
        strategy = Noting(fraction_evaluate=0.0, min_available_nodes=4)
        start = ArrayRecord({"weight": Array(np.zeros(3))})
        result = strategy.start(unequal, start, num_rounds=3, timeout=5.0)
        unequal.save(folder / "rows.csv")
        found.extend(result.arrays["weight"].numpy())

    # Takes half a second, which a collection has no use for.
    from flwr.simulation import run_simulation

    arguments = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    run_simulation(
        server, client, num_supernodes=4,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": arguments},
    )  # fmt: skip
    return hosts, (folder / "rows.csv").read_text(), found[0]


def test_an_app_of_ones_own_trains_on_both_nodes(
    cluster: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    hosts, rows, model = averaged_on_unequal_devices(tmp_path)
    assert hosts == {socket.gethostname(), "second"}
    # Partition 0 takes 8 simulated seconds, and its reply is never in time.
    assert model == pytest.approx(3 * (11 * 1 + 12 * 2 + 13 * 3) / 36)
    assert rows.count("late") == 3 and len(rows.splitlines()) == 1 + 3 * 4


@pytest.mark.usefixtures("same_costs")
def test_a_node_that_is_killed_ends_the_run_which_says_why(
    cluster: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    output, second = cluster

    class Killing(Progress):
        def round(self, number: int, *_: float) -> None:
            if number == 2:
                threading.Timer(0.2, os.killpg, (second.pid, signal.SIGKILL)).start()

    with pytest.raises(ScenarioError, match=r"machine was lost.*--resume"):
        simulate(Simulation(scenario(rounds=200), output), Killing())
    assert not (output / "cells").exists()
