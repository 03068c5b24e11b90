"""Run every method and seed of a scenario through Flower, one after the other, on one grid."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy

from fl_elastic.aggregation import make_rule
from fl_elastic.errors import RegistryError, ScenarioError
from fl_elastic.flower.round_record import RoundRecord
from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.groups import TensorGroup
from fl_elastic.importance import make_importance
from fl_elastic.losses import classification_loss
from fl_elastic.planning import make_policy
from fl_elastic.profiling import CostProfile, save_profile
from fl_elastic.registry import closest
from fl_elastic.simulation.cell import Cell, ClientRound
from fl_elastic.simulation.scenario import MethodSection, Scenario
from fl_elastic.simulation.workload import measure_profile, scenario_model, test_batches
from fl_elastic.storage import write_atomically
from fl_elastic.training import evaluate
from fl_elastic.update import Manifest, load_weights, make_codec, weights_of

__all__ = ["LoggedProgress", "Progress", "Simulation", "check_methods", "run_cells"]

_LOG = logging.getLogger("fl_elastic")

_SERVERS: dict[str, Callable[..., Strategy]] = {
    "fedavg": FedAvg,
    "fedavgm": lambda **options: FedAvgM(server_momentum=0.9, **options),
    "fedadam": lambda **options: FedAdam(eta=0.01, **options),
}


class Progress(Protocol):
    """Hears how far the simulation is."""

    def cell(self, method: str, seed: int, rounds: int) -> None:
        """Hear that a method with a seed starts."""

    def reply(self, received: int, expected: int) -> None:
        """Hear that a client has answered."""

    def round(self, number: int, accuracy: float, loss: float, simulated_seconds: float) -> None:
        """Hear how good the global model is after a round."""


class LoggedProgress:
    """Writes a line per method and seed to the log."""

    def cell(self, method: str, seed: int, rounds: int) -> None:
        """Log the start."""
        _LOG.info("%s, seed %s: %s rounds", method, seed, rounds)

    def reply(self, received: int, expected: int) -> None:
        """Say nothing: Flower logs replies itself."""

    def round(self, number: int, accuracy: float, loss: float, simulated_seconds: float) -> None:
        """Log the quality of the global model."""
        _LOG.info("round %s: accuracy %.4f, loss %.4f, %.1f s simulated",
                  number, accuracy, loss, simulated_seconds)  # fmt: skip


@dataclass(frozen=True)
class Simulation:
    """A scenario and where its files are.

    Attributes
    ----------
    scenario : Scenario
        What to run.
    directory : Path
        For the cost profile, clients' state and finished cells.
    data_root : str or None
        Where datasets are.
    resume : bool
        Whether cells that are already in ``directory`` are taken as they are.
    """

    scenario: Scenario
    directory: Path
    data_root: str | None = None
    resume: bool = False

    @property
    def state_directory(self) -> Path:
        """Where clients keep what they remember from round to round."""
        return self.directory / "state"

    def cell_file(self, method: str, seed: int) -> Path:
        """Return where a finished cell is kept."""
        return self.directory / "cells" / f"{method}-{seed}.json"


def check_methods(scenario: Scenario) -> None:
    """Raise ScenarioError if a method names an unknown plug-in; all of them are reported at once."""
    problems = []
    for method in scenario.methods:
        for look_up, name in (
            (make_policy, method.policy),
            (make_importance, method.importance),
            (make_rule, method.rule),
            (make_codec, method.codec),
        ):
            try:
                look_up(name)
            except RegistryError as error:
                problems.append(f"method {method.name}: {error}")
        if method.server not in _SERVERS:
            known = sorted(_SERVERS)
            problems.append(
                f"method {method.name}: unknown server {method.server!r}"
                f"{closest(method.server, known)}: known are {', '.join(known)}"
            )
    if problems:
        raise ScenarioError("; ".join(problems))


def run_cells(
    simulation: Simulation, grid: Grid, progress: Progress
) -> tuple[list[Cell], tuple[TensorGroup, ...]]:
    """Run all methods and seeds; every finished cell is stored at once."""
    torch.set_num_threads(1)
    scenario = simulation.scenario
    profile = measure_profile(scenario, simulation.data_root)
    profile_path = save_profile(profile, simulation.directory / "profile.json")
    cells = []
    for seed in scenario.seeds:
        for method in scenario.methods:
            path = simulation.cell_file(method.name, seed)
            progress.cell(method.name, seed, scenario.training.rounds)
            if simulation.resume and path.exists():
                cells.append(_finished_cell(path, _fingerprint(scenario, method)))
                continue
            cell = _run_cell(simulation, grid, progress, method, seed, profile, profile_path)
            write_atomically(path, cell.to_json().encode())
            cells.append(cell)
    return cells, profile.graph.groups


def _finished_cell(path: Path, fingerprint: str) -> Cell:
    try:
        cell = Cell.from_json(path.read_text(errors="replace"))
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}") from None
    if cell.scenario != fingerprint:
        raise ScenarioError(
            f"{path} is the result of another scenario: choose another folder, or leave out --resume"
        )
    return cell


def _fingerprint(scenario: Scenario, method: MethodSection) -> str:
    """Return what tells whether a result is that of this method in this scenario, whatever else is run."""
    table = json.loads(scenario.to_json())
    decisive = {name: table[name] for name in ("data", "model", "training", "fleet")}
    decisive["method"] = table["method"][method.name]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _run_cell(
    simulation: Simulation,
    grid: Grid,
    progress: Progress,
    method: MethodSection,
    seed: int,
    profile: CostProfile,
    profile_path: Path,
) -> Cell:
    scenario = simulation.scenario
    cell = Cell(method.name, seed, scenario=_fingerprint(scenario, method))
    model = scenario_model(scenario, simulation.data_root, seed)
    manifest = Manifest.of(model)
    batches = test_batches(scenario, simulation.data_root)
    # What clients remember of an earlier or interrupted run in this folder would sway this one.
    shutil.rmtree(simulation.state_directory / method.name / str(seed), ignore_errors=True)

    def on_round(record: RoundRecord) -> None:
        cell.trained(
            [
                _client_round(reply.metrics, reply.steps, reply.uplink_bytes)
                for reply in record.accepted
            ],
            scenario.clients,
            profile.graph.groups,
            record.downlink_bytes,
            len(record.rejected),
        )

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        load_weights(model, manifest, {name: array.numpy() for name, array in arrays.items()})
        result = evaluate(model, classification_loss, batches)
        cell.evaluated(result.accuracy, result.loss)
        row = cell.history[-1]
        progress.round(server_round, result.accuracy, result.loss, row["simulated_seconds"])
        return MetricRecord({"accuracy": result.accuracy, "loss": result.loss})

    clients = len(scenario.clients)
    inner = _SERVERS[method.server](
        fraction_train=scenario.training.client_fraction,
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=clients,
    )
    strategy = PartialUpdates(inner, rule=method.rule, on_round=on_round)
    initial = {name: Array(array) for name, array in weights_of(model, manifest).items()}
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(initial),
        num_rounds=scenario.training.rounds,
        train_config=ConfigRecord(
            {
                "scenario": scenario.to_json(),
                "method": method.name,
                "seed": seed,
                "profile": str(profile_path),
                "state-dir": str(simulation.state_directory),
                "data-root": simulation.data_root or "",
            }
        ),
        evaluate_fn=evaluate_fn,
    )
    return cell


def _client_round(
    metrics: dict[str, float], steps: dict[str, int], uplink_bytes: int
) -> ClientRound:
    return ClientRound(
        client=int(metrics["client"]),
        tensors=frozenset(steps),
        host_seconds=metrics["predicted-seconds"],
        step_seconds=metrics["step-seconds"],
        steps=int(metrics["steps"]),
        requested_steps=int(metrics["requested-steps"]),
        uplink_bytes=uplink_bytes,
    )
