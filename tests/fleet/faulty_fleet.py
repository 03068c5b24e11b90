"""A real fleet for tests of faults: watched by its journal and by /proc, hurt from outside."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from watched_fleet import QUICK, WatchedFleet

from fl_elastic.fleet.member import descendants
from fl_elastic.fleet.serve import node_launch
from fl_elastic.monitoring.journal import read_journal
from fl_elastic_simulations.scenario import Scenario


def scenario_text(nodes: int, rounds: int, local_epochs: int = 6) -> str:
    """Digits, evenly spread, trained as a whole: what is merged depends on who took part alone."""
    return Scenario.from_json(
        json.dumps(
            {
                "title": "faults",
                "methods": ["full"],
                "data": {"dataset": "digits", "partition": "iid"},
                "model": {"name": "digits_cnn"},
                "training": {
                    "rounds": rounds, "local_epochs": local_epochs, "batch_size": 16,
                    "learning_rate": 0.02, "momentum": 0.9,
                },
                "fleet": [{"device": "pi_5", "count": nodes}],
            }
        )
    ).to_json()  # fmt: skip


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until the condition came true; a failure if it did not in time."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - started


def rounds_of(fleet: WatchedFleet) -> list[dict[str, Any]]:
    """The lines of the server's journal, without that of the first weights."""
    return [line for line in read_journal(fleet.folder.rounds) if line["round"] > 0]


def improved(fleet: WatchedFleet) -> bool:
    """Whether the last model is better than the first weights, by far."""
    lines = read_journal(fleet.folder.rounds)
    return bool(lines[-1]["accuracy"] > lines[0]["accuracy"] + 0.3)


def training(pid: int) -> bool:
    """Whether a SuperNode has a client at work: torch is loaded and it computes."""
    for each in [pid, *(below for below, _ in descendants(pid))]:
        try:
            line = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ")
            loaded = b"libtorch_cpu" in Path(f"/proc/{each}/maps").read_bytes()
        except OSError:
            continue
        if b"flwr-clientapp" in line and loaded:
            return True
    return False


def note(fault: str, **found: object) -> None:
    """Write down what a fault cost, if FL_ELASTIC_FAULTS names a file for it."""
    path = os.environ.get("FL_ELASTIC_FAULTS")
    if path:
        with Path(path).open("a") as stream:
            stream.write(json.dumps({"fault": fault, **found}) + "\n")


class Outsider:
    """A node of the fleet's folder, started in an environment of its own and without being registered."""

    def __init__(
        self, fleet: WatchedFleet, name: str, environment: Mapping[str, str], *before: str
    ) -> None:
        launch = node_launch(fleet.folder.node(name), {**os.environ, **QUICK})
        launch.prepare()
        self.log = fleet.folder.root / "logs" / f"{name}.outside.log"
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*before, *launch.command], env={**launch.environment, **environment}, cwd=launch.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Outsider:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def said(self) -> str:
        return self.log.read_text(errors="replace")
