"""The same model through a real server as one packed buffer, and as Flower's list of arrays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import RunState
from fl_elastic.fleet.local import SERVER, LocalFleet
from fl_elastic_simulations.benchmarks.results import Results

__all__ = ["bench_transport"]

_NODES, _ROUNDS = 2, 2
_WAYS = ("unpacked", "packed", "packed, head", "packed, head, int8")

_PROJECT = """
[project]
name = "transport"
version = "1.0.0"
[tool.flwr.app]
publisher = "fl-elastic"
[tool.flwr.app.components]
serverapp = "transport_app:server_app"
clientapp = "transport_app:client_app"
[tool.flwr.app.config]
way = "packed"
nodes = 1
rounds = 1
results = ""
"""

_APP = """
from fl_elastic_simulations.engine import transport_app

# Flower looks for the names in the text of this file.
server_app = transport_app.server_app
client_app = transport_app.client_app
"""


def bench_transport(results: Results, tell: Callable[[str], None] = print) -> None:
    """Send MobileNetV2 (14 MB, 314 arrays) to two nodes of a real fleet and back, with TLS, two rounds each way.

    One local step, so that what is measured is the way of the model: seconds of a round, the server's CPU seconds,
    and the bytes that Flower itself counts.
    """
    missing = [way for way in _WAYS if way not in results.rows]
    if not missing:
        return
    with LocalFleet(_NODES, config={"threads": 1}) as fleet:
        app = fleet.folder.root / "transport"
        app.mkdir()
        (app / "pyproject.toml").write_text(_PROJECT)
        (app / "transport_app.py").write_text(_APP)
        for way in missing:
            results.add(way, _run(fleet, app, way))
            tell(f"{way}: {results.rows[way]['seconds_per_round']:.1f} s a round")


def _run(fleet: LocalFleet, app: Path, way: str) -> dict[str, Any]:
    out = fleet.folder.root / f"{way.replace(', ', '-').replace(' ', '-')}.json"
    pid = fleet.members[SERVER].pid
    before = _cpu_seconds(pid)
    run = fleet.submit(app, way=way, nodes=_NODES, rounds=_ROUNDS, results=str(out))
    state: RunState = fleet.wait(run)
    if not state.completed:
        raise FleetError(f"{way}: the run ended as {state.status}: {state.details}")
    found = json.loads(out.read_text())
    if found["merged"] != _NODES * _ROUNDS:
        # A machine too busy to start a process in thirty seconds loses its message.
        raise FleetError(
            f"{way}: {found['merged']} replies of {_NODES * _ROUNDS}; measure again alone"
        )
    return {
        "seconds_per_round": float(found["seconds"]) / _ROUNDS,
        "server_cpu_seconds": _cpu_seconds(pid) - before,
        "bytes_to_server": state.to_server_bytes,
        "bytes_to_nodes": state.to_nodes_bytes,
        "rounds": _ROUNDS,
        "nodes": _NODES,
    }


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of the SuperLink's own process: the app's server runs in another one."""
    import os

    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
