"""A real fleet on this machine against the simulation of the same scenario and seed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_elastic.errors import FleetError
from fl_elastic.fleet.up import run_local
from fl_elastic_simulations.benchmarks.federation import Silent
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.engine.quiet import quiet_log
from fl_elastic_simulations.engine.server import Simulation
from fl_elastic_simulations.engine.simulate import simulate
from fl_elastic_simulations.fleet.scenario_text import scenario_text
from fl_elastic_simulations.scenario import Scenario

__all__ = ["bench_fleet"]

_NODES = 4
_METHODS = ("full", "elastic")


@dataclass(frozen=True)
class _Task:
    """What is trained: changes to the scenario of handwritten digits that ``fleet up`` has."""

    name: str
    changes: tuple[str, ...] = field(default=())


_TASKS = (
    _Task("digits", ("training.rounds=8",)),
    _Task(
        "fashion_mnist",
        (
            "data.dataset=fashion_mnist", "model.name=small_cnn", "data.train_limit=1600",
            "data.test_limit=1000", "training.rounds=8", "training.local_epochs=2",
            "training.batch_size=32",
        ),
    ),
)  # fmt: skip


def bench_fleet(
    results: Results, data_root: str | Path | None = None, tell: Callable[[str], None] = print
) -> None:
    """Train digits and Fashion-MNIST on a real server and four real nodes, with TLS and keys, and simulated.

    Accuracy is the mean of the last rounds in both; seconds of a round are real ones, with four nodes sharing this
    machine's processors and each starting a process for its message; bytes are those of the updates, and all that
    Flower itself counts.
    """
    for task in _TASKS:
        for method in _METHODS:
            name = f"{task.name} | {method}"
            if name not in results.rows:
                results.add(name, _row(task, method, data_root, tell))
                tell(f"{name}: {results.rows[name]}")


def _row(
    task: _Task, method: str, data_root: str | Path | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    root = None if data_root is None else str(data_root)
    changes = (*task.changes, f"methods={method}")
    scenario = Scenario.from_json(scenario_text(None, changes, _NODES))
    with quiet_log(), tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch:
        simulation = Simulation(scenario, Path(scratch), root)
        simulated = simulate(simulation, Silent(), engine="local")["methods"][method]
    state, found = run_local(
        _NODES, None, (*task.changes, f"methods={method}"), method=method, data_root=root, tell=tell
    )
    if not state.completed:
        raise FleetError(f"the run of {task.name}, {method} ended as {state.status}")
    return {
        "accuracy": found["final_accuracy"],
        "simulated_accuracy": simulated["final_accuracy"],
        "rounds": found["rounds"],
        "seconds_per_round": found["seconds_per_round"],
        "uplink_bytes": found["uplink_bytes"],
        "simulated_uplink_bytes": simulated["uplink_bytes"],
        "flower_bytes_to_server": found["flower_bytes_to_server"],
        "flower_bytes_to_nodes": found["flower_bytes_to_nodes"],
    }
