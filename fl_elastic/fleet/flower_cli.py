"""Flower's ``flwr`` command, run as a process to manage nodes and runs of a SuperLink."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_elastic.errors import FleetError
from fl_elastic.fleet.commands import command_path, flower_environment
from fl_elastic.fleet.inventory import Server
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.operator_files import CONNECTION, ensure_operator

_SECONDS = 60.0
# Characters of the box that Flower draws around some of its errors.
_FRAME = dict.fromkeys(map(ord, "─│╭╮╰╯"), " ")


class ServerUnreachable(FleetError):
    """The SuperLink does not answer."""


class AlreadyRegistered(FleetError):
    """The key is, or was, registered at the SuperLink."""


@dataclass(frozen=True)
class NodeState:
    """A node as the SuperLink reports it.

    Parameters
    ----------
    node_id : str
        Id of the node at the SuperLink.
    status : str
        ``registered``, ``online``, ``offline`` or ``unregistered``.
    online_at, offline_at : str, optional
        When it last came online and last went offline, in UTC.
    """

    node_id: str
    status: str
    online_at: str | None = None
    offline_at: str | None = None


@dataclass(frozen=True)
class RunState:
    """A run as the SuperLink reports it.

    Parameters
    ----------
    run_id : str
        Id of the run at the SuperLink.
    status : str
        ``pending``, ``starting``, ``running``, ``finished:completed``, ``finished:failed`` or
        ``finished:stopped``.
    details : str
        Details from the SuperLink.
    elapsed : float
        Seconds since it started.
    to_server_bytes, to_nodes_bytes : int
        Bytes sent in each direction, as Flower counts them.
    """

    run_id: str
    status: str
    details: str = ""
    elapsed: float = 0.0
    to_server_bytes: int = 0
    to_nodes_bytes: int = 0

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether the run has ended successfully."""
        return self.status == "finished:completed"


Process = Callable[[list[str], dict[str, str], Path, float], "subprocess.CompletedProcess[str]"]


def _start(
    command: list[str], env: dict[str, str], cwd: Path, seconds: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip


@dataclass(frozen=True)
class FlowerCommands:
    """The ``flwr`` command with a fleet's settings.

    Parameters
    ----------
    home : Path
        Folder of its settings (``FLWR_HOME``), absolute.
    server : Server
        The fleet's server.
    start : callable
        Runs a command in an environment and folder, with a time limit; replaced in tests.
    """

    home: Path
    server: Server
    start: Process = _start

    def nodes(self) -> list[NodeState]:
        """Return all nodes that the SuperLink knows.

        Raises
        ------
        FleetError
            If the SuperLink does not answer, or not as expected; this also holds for the methods below.
        """
        answer = self._ask("supernode", "list", CONNECTION)
        return [_node_state(entry) for entry in _entries(answer, "nodes")]

    def register(self, public_key: Path, name: str) -> str:
        """Register a public key and return the node's id."""
        # The command runs in a different folder from the caller.
        key = str(public_key.absolute())
        answer = self._ask("supernode", "register", key, CONNECTION, "--name", name)
        return str(answer.get("node-id", ""))

    def unregister(self, node_id: str) -> None:
        """Unregister a node; one that the SuperLink does not know counts as unregistered."""
        try:
            self._ask("supernode", "unregister", node_id, CONNECTION)
        except FleetError as error:
            if "not found" not in str(error).lower():
                raise

    def run(self, app: Path, config: Path) -> str:
        """Submit an app with the settings in a TOML file and return the run's id."""
        settings = str(config.absolute())
        answer = self._ask("run", str(app.absolute()), CONNECTION, "--run-config", settings)
        return str(answer["run-id"])

    def run_state(self, run_id: str) -> RunState:
        """Return the state of a run."""
        answer = self._ask("ls", CONNECTION, "--run-id", run_id)
        runs = _entries(answer, "runs")
        if not runs:
            raise FleetError(f"the server knows no run {run_id}; see them with: flwr ls")
        return _run_state(runs[0])

    def stop(self, run_id: str) -> None:
        """Stop a run."""
        self._ask("stop", run_id, CONNECTION)

    def _ask(self, *arguments: str) -> dict[str, Any]:
        env = flower_environment(os.environ, self.home, self.server.addresses)
        # Without these, colours and line breaks would disturb the parsed output.
        env |= {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
        command = [command_path("flwr"), *arguments, "--format", "json"]
        said = f"flwr {' '.join(arguments[:2])}"
        try:
            ended = self.start(command, env, self.home, _SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ServerUnreachable(f"{said} gave no answer in {_SECONDS:.0f} s") from error
        answer = _read(ended.stdout)
        if answer is not None and answer.get("success"):
            return answer
        message = str((answer or {}).get("error-message") or ended.stderr or ended.stdout)
        raise _failure(said, message, self.server)


def flower_at(folder: FleetFolder, server: Server) -> FlowerCommands:
    """Return Flower's command for a fleet; its settings are updated first."""
    for _ in ensure_operator(folder, server):
        pass
    return FlowerCommands(folder.operator.resolve(), server)


def _failure(said: str, message: str, server: Server) -> FleetError:
    text = " ".join(message.translate(_FRAME).split())[-300:].strip() or "it said nothing"
    if "unavailable" in text.lower():
        return ServerUnreachable(
            f"no server answers at {server.addresses[0]} port {server.port}; "
            "start it with: fl-elastic fleet server DIR, or see what is wrong with: fl-elastic fleet doctor DIR"
        )
    if "already in use" in text.lower():
        return AlreadyRegistered(f"{said}: {text}")
    return FleetError(f"{said} failed: {text}")


def _read(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a command's output, which may begin with warnings; None if there is none."""
    start = text.find("{")
    while start >= 0:
        try:
            found = json.loads(text[start:])
        except ValueError:
            start = text.find("{", start + 1)
            continue
        except RecursionError:
            return None
        return found if isinstance(found, dict) else None
    return None


def _entries(answer: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = answer.get(key)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _node_state(entry: dict[str, Any]) -> NodeState:
    return NodeState(
        node_id=str(entry.get("node-id", "")),
        status=str(entry.get("status", "unknown")),
        online_at=_said(entry.get("online-at")),
        offline_at=_said(entry.get("offline-at")),
    )


def _run_state(entry: dict[str, Any]) -> RunState:
    traffic = entry.get("network-traffic")
    traffic = traffic if isinstance(traffic, dict) else {}
    return RunState(
        run_id=str(entry.get("run-id", "")),
        status=str(entry.get("status", "unknown")),
        details=_said(entry.get("status-details")) or "",
        elapsed=float(entry.get("elapsed") or 0.0),
        to_server_bytes=int(traffic.get("inbound-bytes") or 0),
        to_nodes_bytes=int(traffic.get("outbound-bytes") or 0),
    )


def _said(value: object) -> str | None:
    return value if isinstance(value, str) and value and value != "N/A" else None
