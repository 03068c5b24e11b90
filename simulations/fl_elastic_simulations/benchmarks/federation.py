"""Compare all methods for unequal clients in the same simulated fleets: accuracy, time, bytes, cost of choosing."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pandas as pd
import torch

from fl_elastic.errors import ProfileError, ScenarioError
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic_simulations.benchmarks.benchmark import (
    Benchmark,
    Request,
    Row,
    Rows,
    chosen_tasks,
)
from fl_elastic_simulations.benchmarks.federation_methods import REFERENCE
from fl_elastic_simulations.benchmarks.federation_tasks import (
    TASKS,
    FederationTask,
    bandwidth_of,
    method_key,
    methods_of,
    task_scenario,
)
from fl_elastic_simulations.benchmarks.intervals import mean_text
from fl_elastic_simulations.engine.choosing import ChoosingCosts, measure_choosing
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.progress import Progress
from fl_elastic_simulations.engine.quiet import quiet_log
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation, run_method
from fl_elastic_simulations.engine.summary import final_accuracy
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario.scenario import Scenario

Cells: TypeAlias = Mapping[int, Mapping[str, Any]]
"""Rows of one method in one task, by seed."""

# Margin of a round's time, since message headers add a little to the bytes of its arrays.
_SPARE = 1.01
_DECIMALS = 4


class Federation(Benchmark):
    """Accuracy, time and bytes of all methods for unequal clients in the same simulated fleets.

    All methods of a task get the simulated time that the reference, FedAvg waiting for its slowest client, needs
    for its rounds. They also share the measured costs of training and of choosing, which are stored beside the
    table.
    """

    name = "federation"
    takes = ("tasks", "methods", "seeds")
    tasks: ClassVar[Mapping[str, FederationTask]] = TASKS
    columns: ClassVar[Mapping[str, FederationTask]] = TASKS
    """Tasks that get a column in tables."""

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return every method of every task with every seed."""
        tasks = {name: self.tasks[name] for name in chosen_tasks(request.tasks, self.tasks)}
        wanted = chosen_tasks(request.methods, methods_of(self.tasks), what="method")
        costs = request.folder.with_name("federation")
        for name, task in tasks.items():
            if task.time_of:
                task_costs(task.time_of, self.tasks[task.time_of], costs, request.data_root)
            task_costs(name, task, costs, request.data_root)
        return {
            f"{name} | {method} | {seed}": (name, task, method, seed, costs, request.data_root)
            for seed in request.seeds or self.seeds
            for name, task in tasks.items()
            for method in task.methods
            if method in wanted
        }

    def run(
        self, name: str, task: FederationTask, method: str, seed: int, costs: Path, data_root: str
    ) -> Row:
        """Run one method of one task with one seed."""
        return federation_cell(name, task, method, seed, costs, data_root)

    def summary(self, row: Mapping[str, Any]) -> str:
        """Return accuracy, rounds and processor time."""
        return (
            f"{row['final_accuracy']:.3f} after {row['rounds']} rounds, {row['cpu_seconds']:.0f} s"
        )

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return the table of accuracies, with time and bytes relative to waiting, and that of choosing costs."""
        return {
            "accuracy": self.by_task(rows, self._accuracy),
            "charges": self.by_task(rows, self._charges),
        }

    def by_task(
        self,
        rows: Rows,
        cell: Callable[[Cells, Cells], str],
        against: str = REFERENCE,
        tasks: Mapping[str, FederationTask] | None = None,
    ) -> pd.DataFrame:
        """Return a table of methods by tasks whose cells are computed from a method's rows and the reference's.

        The tasks are those that get a column, unless others are given.
        """
        columns = {}
        tasks = self.columns if tasks is None else tasks
        methods = methods_of(tasks)
        for name, task in tasks.items():
            reference = cells_of(rows, name, against)
            column = {
                method: cell(own, reference)
                for method in methods
                if (own := cells_of(rows, name, method)) and set(own) & set(reference)
            }
            if column:
                columns[task.title] = column
        table = pd.DataFrame(columns)
        return table.reindex([each for each in methods if each in table.index]).rename_axis(
            "method"
        )

    def _accuracy(self, own: Cells, reference: Cells) -> str:
        seeds = sorted(set(own) & set(reference))
        found = [each for seed in seeds if (each := sooner(own[seed], reference[seed]))]
        ratios = "never"
        if found:
            some = f" in {len(found)} of {len(seeds)}" if len(found) < len(seeds) else ""
            means = (statistics.fmean(each) for each in zip(*found, strict=True))
            ratios = ", ".join(f"{mean:.1f}x" for mean in means) + some
        accuracy = mean_text([own[seed]["final_accuracy"] for seed in seeds])
        return f"{accuracy} ({ratios}){self.of_seeds(len(seeds))}"

    def _charges(self, own: Cells, reference: Cells) -> str:
        rows = pd.DataFrame([own[seed] for seed in sorted(set(own) & set(reference))])
        means, clients = rows.mean(numeric_only=True), rows["client_seconds"].sum()
        if not means["choosing_seconds"] and not means["profile_seconds"]:
            return "none"
        return ", ".join(
            f"{means[name]:.3g} s ({100 * rows[name].sum() / clients:.1f} %)"
            for name in ("choosing_seconds", "profile_seconds")
        )

    def of_seeds(self, count: int) -> str:
        """Return a note on the number of seeds behind a figure, empty if it is the usual number.

        >>> BENCHMARK.of_seeds(1), BENCHMARK.of_seeds(3), BENCHMARK.of_seeds(5)
        (' [1 of 3 seeds]', '', ' [5 seeds]')
        """
        if count == len(self.seeds):
            return ""
        return f" [{count} of {len(self.seeds)} seeds]" if count < 3 else f" [{count} seeds]"


def cells_of(rows: Rows, task: str, method: str) -> dict[int, Mapping[str, Any]]:
    """Return the rows of a method in a task, by seed."""
    begin = f"{task} | {method} | "
    return {
        int(name.removeprefix(begin)): row for name, row in rows.items() if name.startswith(begin)
    }


def sooner(
    cell: Mapping[str, Any], reference: Mapping[str, Any]
) -> tuple[float, float, float] | None:
    """Return how many times sooner a method reaches the reference's final accuracy than the reference does.

    The ratios are those of simulated time, bytes uplink and bytes both ways, each at the first test that reaches
    this accuracy; None if the method never does. Tests come at the same times for all methods, so that the
    length of a method's rounds neither helps nor delays it.

    >>> slow = {"final_accuracy": 0.5, "curve": [[4.0, 8, 8, 0.4], [8.0, 16, 16, 0.5]]}
    >>> fast = {"final_accuracy": 0.6, "curve": [[2.0, 2, 2, 0.5], [4.0, 8, 8, 0.6]]}
    >>> sooner(fast, slow)
    (4.0, 8.0, 8.0)
    """
    # Rounded like the points of a curve: otherwise the reference might never reach its own final accuracy.
    target = round(reference["final_accuracy"], _DECIMALS)
    reached = []
    for row in (cell, reference):
        points = (p[:3] for p in row["curve"] if p[3] >= target and p[2] > 0)
        reached.append(next(points, None))
    ours, theirs = reached
    if ours is None or theirs is None or min(ours[:2]) <= 0:
        return None
    return theirs[0] / ours[0], theirs[1] / ours[1], sum(theirs[1:]) / sum(ours[1:])


def task_costs(
    name: str, task: FederationTask, folder: Path, data_root: str
) -> tuple[CostProfile, ChoosingCosts]:
    """Return the costs of training and of choosing in a task, as stored, or measured now.

    Both are measured in one go, so that the machine is equally fast for both.
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
    name: str, task: FederationTask, method: str, seed: int, costs: Path, data_root: str
) -> Row:
    """Run one method of one task with one seed in this process; return its row."""
    torch.set_num_threads(1)
    profile, choosing = task_costs(name, task, costs, data_root)
    times = load_profile(costs / f"{task.time_of}.json") if task.time_of else profile
    scenario = _timed(task, times)
    section = next(each for each in scenario.methods if each.name == method_key(method))
    # If a cost were missing, each client would refuse in every round, and the row would show no gain for the
    # method.
    choosing.refuse_missing(section, {client.device.name for client in scenario.clients})
    started = time.process_time()
    with quiet_log(), tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch:
        simulation = Simulation(scenario, Path(scratch), data_root)
        grid = InProcessGrid(len(scenario.clients), simulated_client_app())
        cell = run_method(simulation, grid, Progress(), section, seed, profile, choosing)
    return row_of(cell) | {"cpu_seconds": round(time.process_time() - started, 1)}


def _timed(task: FederationTask, profile: CostProfile) -> Scenario:
    """Return the scenario, limited to the simulated time that the reference needs for its rounds."""
    bandwidth = bandwidth_of(task, profile)
    slowest = max(slowdown for slowdown, _ in task.speeds)
    sent = float(profile.parameter_bytes.sum())
    full_round = (
        task.training["local_steps"] * profile.full_step_seconds * slowest + 1.5 * sent / bandwidth
    )
    return task_scenario(task, bandwidth, task.reference_rounds * full_round * _SPARE)


def row_of(run: RunResult) -> Row:
    """Return the stored row of a run: the final figures, and the tests better than all before, with the last one.

    A point of the curve holds simulated seconds, uplink and downlink bytes so far, and accuracy. A new model counts
    from the time when it was there, except at the last test.
    """
    history, last = pd.DataFrame(run.history), run.history[-1]
    new = (history["since"].diff() != 0) & (history.index < len(history) - 1)
    history["simulated_seconds"] = history["since"].where(new, history["simulated_seconds"])
    curve = history[["simulated_seconds", "uplink_bytes", "downlink_bytes", "accuracy"]]
    tested = history["accuracy"].tolist()[1:]
    return {
        "final_accuracy": final_accuracy(tested, at_equal_times=True),
        "rounds": int(last["round"]),
        **{name: last[name] for name in ("simulated_seconds", "uplink_bytes", "downlink_bytes")},
        "accepted": run.accepted,
        "rejected": run.rejected,
        "client_seconds": run.client_seconds,
        "choosing_seconds": run.choosing_seconds,
        "profile_seconds": run.profile_seconds,
        "features_found": run.features_found,
        "features_computed": run.features_computed,
        "curve": best_so_far(curve.round(_DECIMALS).values.tolist()),
    }


def best_so_far(curve: list[list[float]]) -> list[list[float]]:
    """Return the tests after a round that are better than all tests before them, and the last test.

    >>> best_so_far([[0, 0, 0, 0.9], [1, 2, 2, 0.3], [2, 4, 4, 0.2], [3, 6, 6, 0.4], [4, 8, 8, 0.4]])
    [[1, 2, 2, 0.3], [3, 6, 6, 0.4], [4, 8, 8, 0.4]]
    """
    kept: list[list[float]] = []
    for point in curve:
        if point[2] > 0 and all(point[3] > before[3] for before in kept):
            kept.append(point)
    return kept if kept[-1:] == curve[-1:] else [*kept, curve[-1]]


BENCHMARK = Federation()
