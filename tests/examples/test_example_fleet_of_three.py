"""The fleet of three: its app in one process, and the whole of it with real processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_copies import copied, ran
from flwr.app import Context, RecordDict
from in_process_grid import InProcessGrid
from real_processes import free_port

from fl_elastic.monitoring.journal import read_journal


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = copied("fleet_of_three", tmp_path)
    monkeypatch.syspath_prepend(str(place / "app"))
    yield place
    for name in [each for each in sys.modules if each.split(".")[0] == "fleet_of_three"]:
        del sys.modules[name]


def run_of(folder: Path, *, rounds: int, nodes: int) -> tuple[InProcessGrid, Context]:
    """What the server's app is given where so many of the three nodes are there."""
    from fleet_of_three import client_app

    config = {
        "num-server-rounds": rounds, "num-nodes": 3, "results": str(folder / "results"),
        "resume": False,
    }  # fmt: skip
    grid = InProcessGrid(nodes, lambda node: client_app.app)
    for number, context in grid._contexts.items():
        context.run_config = dict(config)
        context.node_config = {
            "partition-id": number - 1, "state-dir": str(folder / f"node{number}"),
            "threads": 1, "speedup": number,
        }  # fmt: skip
    own = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config))
    return grid, own


@pytest.mark.slow
def test_its_app_trains_and_writes_down_what_the_status_shows(place: Path, tmp_path: Path) -> None:
    from fleet_of_three import server_app

    server_app.app(*run_of(tmp_path, rounds=1, nodes=3))
    results = tmp_path / "results"
    rounds = read_journal(results / "rounds.jsonl")
    assert [each["round"] for each in rounds] == [0, 1]
    assert [len(each["nodes"]) for each in rounds] == [0, 3]
    assert all(said["step_seconds"] > 0 for said in rounds[-1]["nodes"].values())
    assert len(list((results / "checkpoints").glob("round-*.state"))) == 1
    assert all((tmp_path / f"node{number}" / "metrics.jsonl").exists() for number in (1, 2, 3))


def test_its_app_goes_on_with_two_of_three_nodes(place: Path, tmp_path: Path) -> None:
    from fleet_of_three import server_app

    # It would wait for the third one for ever.
    run = run_of(tmp_path, rounds=1, nodes=2)
    waited = threading.Thread(target=server_app.app, args=run, daemon=True)
    waited.start()
    waited.join(60)
    assert not waited.is_alive()
    assert [len(each["nodes"]) for each in read_journal(tmp_path / "results" / "rounds.jsonl")] == [
        0,
        2,
    ]


def four_free_ports() -> int:
    """The first of four ports after each other that nobody listens on."""
    while True:
        first = free_port()
        try:
            for port in range(first, first + 4):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first


@pytest.mark.deploy
@pytest.mark.slow
def test_real_nodes_train_it_and_nothing_stays(place: Path) -> None:
    said = ran(place, "./run.sh", "2", seconds=900, PORT=str(four_free_ports()))
    assert "round 2, accuracy" in said and "finished:completed" in said
    assert said.count("online") == 3
    rounds = read_journal(place / "fleet" / "server" / "results" / "rounds.jsonl")
    assert [sorted(each["nodes"]) for each in rounds] == [
        [], *[["node0", "node1", "node2"]] * 2
    ]  # fmt: skip
    left = subprocess.run(
        ["pgrep", "--full", str(place)], capture_output=True, text=True, check=False
    )
    assert left.stdout == "", left.stdout
    node = json.loads(
        (place / "fleet/nodes/node2/state/metrics.jsonl").read_text().splitlines()[-1]
    )
    assert node["round"] == 2
