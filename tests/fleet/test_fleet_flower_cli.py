"""Flower's command: what is asked, and what its answers and failures become."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import (
    AlreadyRegistered,
    FlowerCommands,
    NodeState,
    RunState,
    ServerUnreachable,
)
from fl_elastic.fleet.inventory import Server


@dataclass
class Scripted:
    """Answers like Flower's command, and remembers what it was asked."""

    answer: Any = None
    text: str | None = None
    error: str = ""
    asked: list[list[str]] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)

    def __call__(
        self, command: list[str], env: dict[str, str], cwd: Path, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        self.asked.append(command[1:])
        self.environments.append(env)
        out = json.dumps(self.answer) if self.text is None else self.text
        return subprocess.CompletedProcess(command, 0, out, self.error)


def flower(script: Scripted) -> FlowerCommands:
    return FlowerCommands(Path("/fleet/operator"), Server(("server.lan",), 8000), script)


def test_nodes_are_listed() -> None:
    script = Scripted(
        {
            "success": True,
            "nodes": [
                {
                    "node-id": "18446744073709551615", "status": "online",
                    "online-at": "2030-01-01 00:00:00Z", "offline-at": "N/A", "more": 1,
                },
                {"node-id": "7", "status": "offline"},
                "nonsense",
            ],
        }
    )  # fmt: skip
    assert flower(script).nodes() == [
        NodeState("18446744073709551615", "online", "2030-01-01 00:00:00Z", None),
        NodeState("7", "offline"),
    ]
    assert script.asked == [["supernode", "list", "fleet", "--format", "json"]]
    environment = script.environments[0]
    assert environment["FLWR_HOME"] == "/fleet/operator" and environment["NO_COLOR"] == "1"
    assert "server.lan" in environment["NO_PROXY"]


def test_what_is_asked() -> None:
    script = Scripted({"success": True, "node-id": 9, "run-id": 5})
    asked = flower(script)
    assert asked.register(Path("/k.pub"), "pi0") == "9"
    asked.unregister("9")
    assert asked.run(Path("/app"), Path("/run.toml")) == "5"
    # The command works in a folder of its own.
    asked.register(Path("k.pub"), "pi0")
    assert Path(script.asked.pop()[2]) == Path("k.pub").absolute()
    asked.stop("5")
    assert [" ".join(words[:-2]) for words in script.asked] == [
        "supernode register /k.pub fleet --name pi0",
        "supernode unregister 9 fleet",
        "run /app fleet --run-config /run.toml",
        "stop 5 fleet",
    ]


def test_how_a_run_is() -> None:
    traffic = {"inbound-bytes": 10, "outbound-bytes": 20}
    run = {"run-id": "5", "status": "finished:failed", "status-details": "boom", "elapsed": 3}
    state = flower(
        Scripted({"success": True, "runs": [run | {"network-traffic": traffic}]})
    ).run_state("5")
    assert state == RunState("5", "finished:failed", "boom", 3.0, 10, 20)
    assert state.finished and not state.completed
    silent = flower(Scripted({"success": True, "runs": [{"run-id": "5", "status-details": "N/A"}]}))
    assert silent.run_state("5") == RunState("5", "unknown")
    assert RunState("5", "finished:completed").completed
    assert not RunState("5", "running").finished
    with pytest.raises(FleetError, match="knows no run 5"):
        flower(Scripted({"success": True, "runs": []})).run_state("5")


def test_warnings_before_the_answer_are_skipped() -> None:
    text = 'WARN {old} setting\n{"success": true,\n "nodes": []}\n'
    assert flower(Scripted(text=text)).nodes() == []


@pytest.mark.parametrize(
    ("message", "kind", "words"),
    [
        (
            "Connection to the SuperLink is unavailable. Please",
            ServerUnreachable,
            "server.lan port 8000",
        ),
        ("[code: 23] Public key already in use.", AlreadyRegistered, "already in use"),
        ("boom\non two\nlines", FleetError, "boom on two lines"),
        ("╭─ Error ─╮\n│ boom │\n╰───────╯\n", FleetError, "failed: Error boom$"),
    ],
)
def test_failures_are_told_apart(message: str, kind: type[FleetError], words: str) -> None:
    script = Scripted({"success": False, "error-message": message})
    with pytest.raises(kind, match=words) as raised:
        flower(script).nodes()
    assert len(str(raised.value).splitlines()) == 1


def test_an_answer_that_is_none_is_one_line() -> None:
    for script in (
        Scripted(text=""),
        Scripted(text="[1]"),
        Scripted(text="", error="Traceback\nboom"),
    ):
        with pytest.raises(FleetError, match="flwr supernode list failed"):
            flower(script).nodes()


def test_unregistering_what_is_gone_is_no_error() -> None:
    flower(
        Scripted({"success": False, "error-message": "Node ID not found for account."})
    ).unregister("7")
    with pytest.raises(FleetError, match="boom"):
        flower(Scripted({"success": False, "error-message": "boom"})).unregister("7")


def test_silence_is_a_server_that_cannot_be_reached() -> None:
    def silent(*_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("flwr", 60)

    with pytest.raises(ServerUnreachable, match="no answer in 60 s"):
        FlowerCommands(Path("/h"), Server(("server.lan",), 8000), silent).nodes()
