"""Every method of unequal clients in the same simulated fleets: accuracy, time, bytes, coverage."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_elastic.errors import ProfileError, ScenarioError
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic_simulations.benchmarks.cells import add_missing, chosen_tasks
from fl_elastic_simulations.benchmarks.federation_page import write_federation_page
from fl_elastic_simulations.benchmarks.federation_summary import DECIMALS, summarise_task
from fl_elastic_simulations.benchmarks.federation_tasks import (
    SEEDS,
    TASKS,
    FederationTask,
    bandwidth_of,
    method_key,
    methods_of,
    task_scenario,
)
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.data.datasets import data_root_folder
from fl_elastic_simulations.engine.cell import Cell
from fl_elastic_simulations.engine.choosing import ChoosingCosts, measure_choosing
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.quiet import quiet_log
from fl_elastic_simulations.engine.server import Simulation, run_cell
from fl_elastic_simulations.engine.summary import final_accuracy
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario.scenario import Scenario

__all__ = ["SEEDS", "Silent", "bench_federation", "cell_name", "federation_cell", "task_costs"]

# Headers of messages make a round a little longer than its numbers do.
_SPARE = 1.01
_QUICK_TASKS = ("cifar-correlated-0.3", "har-correlated")
_QUICK_SHARE = 0.25


class Silent:
    """Progress that nobody watches."""

    def cell(self, method: str, seed: int, rounds: int) -> None:
        """Hear nothing."""

    def reply(self, received: int, expected: int) -> None:
        """Hear nothing."""

    def round(self, number: int, accuracy: float, loss: float, simulated_seconds: float) -> None:
        """Hear nothing."""


def bench_federation(
    results: Results,
    data_root: str | Path | None = None,
    *,
    among: Mapping[str, FederationTask] = TASKS,
    tasks: Iterable[str] = (),
    seeds: Iterable[int] = SEEDS,
    methods: Iterable[str] = (),
    quick: bool = False,
    workers: int = 2,
    tell: Callable[[str], None] = print,
) -> None:
    """Run every method of every task with every seed; finished cells are kept.

    All methods of a task get the simulated time in which the reference, FedAvg waiting for its slowest client, does
    its rounds, and the same measured costs, of training and of choosing, stored beside the table. Several processes
    may fill one table, each with cells of its own.

    Parameters
    ----------
    results : Results
        The table.
    data_root : path-like, optional
        Where the datasets are.
    among : mapping of str to FederationTask
        The benchmark's tasks.
    tasks : iterable of str
        Names of them; all if none is given.
    seeds : iterable of int
        Of splits, first weights and batches.
    methods : iterable of str
        Names of their methods; all if none is given.
    quick : bool
        A quarter of the time of two tasks with one seed.
    workers : int
        Cells at a time, each on one core.
    tell : callable
        Hears of each finished cell.

    Raises
    ------
    ScenarioError
        If a task or method is unknown.
    """
    root = str(data_root_folder(data_root))
    names = chosen_tasks(tasks or (_QUICK_TASKS if quick else ()), among)
    chosen = {name: _quick(among[name]) if quick else among[name] for name in names}
    wanted = chosen_tasks(methods, methods_of(among), what="method")
    profiles = results.path.parent / "federation"
    for name, task in chosen.items():
        task_costs(name, task, profiles, root)
    cells = {
        cell_name(name, method, seed): (name, task, method, seed, str(profiles), root)
        for seed in ([0] if quick else list(seeds))
        for name, task in chosen.items()
        for method in task.methods
        if method in wanted
    }
    try:
        add_missing(
            results, federation_cell, cells, workers, tell,
            lambda row: f"{row['final_accuracy']:.3f} after {row['rounds']} rounds, {row['cpu_seconds']:.0f} s",
        )  # fmt: skip
    finally:
        # Also where it was interrupted: what is there is worth a table.
        results.catch_up()
        for name, task in chosen.items():
            for method, row in summarise_task(results.rows, name, list(task.methods)).items():
                results.add(f"summary {name} | {method}", row)
        if results.rows:
            write_federation_page(
                results.rows, results.measured_with(), results.path.with_suffix(".html"), among
            )


def cell_name(task: str, method: str, seed: int) -> str:
    """Return the row's name of one cell."""
    return f"{task} | {method} | {seed}"


def task_costs(
    name: str, task: FederationTask, folder: Path, data_root: str
) -> tuple[CostProfile, ChoosingCosts]:
    """Return what a task's clock goes by: costs of training and of choosing, as stored, or else measured now.

    Both are measured at the same time, so that one is as fast as the other.
    """
    costs = task.costs or name
    path, beside = folder / f"{costs}.json", folder / f"{costs}-choosing.json"
    try:
        return load_profile(path), ChoosingCosts.load(beside)
    except (ProfileError, ScenarioError):
        torch.set_num_threads(1)
        profile = measure_profile(task_scenario(task), data_root)
        scenario = task_scenario(task, bandwidth_of(task, profile))
        choosing = measure_choosing(scenario, data_root, profile)
        save_profile(profile, path)
        choosing.save(beside)
        return profile, choosing


def federation_cell(
    name: str, task: FederationTask, method: str, seed: int, profiles: str, data_root: str
) -> dict[str, Any]:
    """Run one method of one task with one seed in this process; return its row."""
    torch.set_num_threads(1)
    profile, choosing = task_costs(name, task, Path(profiles), data_root)
    scenario = _timed(task, profile)
    section = next(each for each in scenario.methods if each.name == method_key(method))
    # Clients would refuse one by one, in every round, and the row would say that the method gains nothing.
    choosing.refuse_missing(section, {client.device.name for client in scenario.clients})
    started = time.process_time()
    with quiet_log(), tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch:
        simulation = Simulation(scenario, Path(scratch), data_root)
        save_profile(profile, simulation.profile_file)
        grid = InProcessGrid(len(scenario.clients), simulated_client_app())
        cell = run_cell(simulation, grid, Silent(), section, seed, profile, choosing)
    return _row(cell) | {"cpu_seconds": round(time.process_time() - started, 1)}


def _timed(task: FederationTask, profile: CostProfile) -> Scenario:
    """Return the scenario with the simulated time of the reference's rounds."""
    bandwidth = bandwidth_of(task, profile)
    slowest = max(slowdown for slowdown, _ in task.speeds)
    sent = float(profile.parameter_bytes.sum())
    full_round = (
        task.training["local_steps"] * profile.full_step_seconds * slowest + 1.5 * sent / bandwidth
    )
    return task_scenario(task, bandwidth, task.reference_rounds * full_round * _SPARE)


def _row(cell: Cell) -> dict[str, Any]:
    """Return what is kept of a cell: the curve, final figures, and how much of the model each class trained.

    A point of the curve is simulated seconds, bytes up and down until then, and accuracy.
    """
    last = cell.history[-1]
    coverage = {
        device: np.mean(shares, axis=0) for device, shares in cell.coverage.items() if shares
    }
    return {
        "final_accuracy": final_accuracy(
            [row["accuracy"] for row in cell.history[1:]], at_equal_times=True
        ),
        "rounds": int(last["round"]),
        "simulated_seconds": last["simulated_seconds"],
        "uplink_bytes": last["uplink_bytes"],
        "downlink_bytes": last["downlink_bytes"],
        "accepted": cell.accepted,
        "rejected": cell.rejected,
        "client_seconds": cell.client_seconds,
        "choosing_seconds": cell.choosing_seconds,
        "profile_seconds": cell.profile_seconds,
        "curve": [
            [
                round(row["simulated_seconds"], DECIMALS),
                row["uplink_bytes"],
                row["downlink_bytes"],
                round(row["accuracy"], DECIMALS),
            ]
            for row in cell.history
        ],
        "cuts": [[round(seconds, DECIMALS), group] for seconds, group in cell.cuts],
        "features_found": cell.features_found,
        "features_computed": cell.features_computed,
        "coverage": {
            device: {"mean": round(float(each.mean()), 3), "least": round(float(each.min()), 3)}
            for device, each in coverage.items()
        },
    }


def _quick(task: FederationTask) -> FederationTask:
    rounds = max(round(task.reference_rounds * _QUICK_SHARE), 1)
    return replace(task, reference_rounds=rounds)
