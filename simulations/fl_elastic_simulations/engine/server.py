"""Run every method and seed of a scenario through Flower, one after the other, on one grid."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

from fl_elastic.errors import ModelError, ScenarioError
from fl_elastic.flower.records import as_arrays, as_record
from fl_elastic.flower.round import AcceptedReply, RoundRecord
from fl_elastic.groups import TensorGroup
from fl_elastic.losses import classification_loss
from fl_elastic.profiling import CostProfile, load_profile, save_profile
from fl_elastic.readout.place import BODY
from fl_elastic.state.files import write_atomically
from fl_elastic.training import evaluate
from fl_elastic.update import Manifest, load_weights, weights_of
from fl_elastic.update.manifest import places_of
from fl_elastic_simulations.engine.charges import Charges
from fl_elastic_simulations.engine.choosing import ChoosingCosts, measure_choosing
from fl_elastic_simulations.engine.client import CHARGES, LATE, NO_DATA
from fl_elastic_simulations.engine.client_slot import PEAK_BYTES
from fl_elastic_simulations.engine.head_costs import HeadCosts
from fl_elastic_simulations.engine.method_model import method_model
from fl_elastic_simulations.engine.methods import method_strategy
from fl_elastic_simulations.engine.progress import Progress
from fl_elastic_simulations.engine.run_result import ClientRound, RunResult
from fl_elastic_simulations.engine.scenario_grid import on_fleet
from fl_elastic_simulations.engine.supplied_grid import SuppliedGrid, on_a_cluster
from fl_elastic_simulations.engine.timed_tests import Test, TimedTests, Weights
from fl_elastic_simulations.engine.workload import (
    label_counts,
    measure_profile,
    measured_beside,
    test_batches,
)
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.scenario.sections import MethodSection, TrainingSection
from fl_elastic_simulations.unequal.clock import round_seconds
from fl_elastic_simulations.unequal.grid import UnequalGrid

_LOG = logging.getLogger("fl_elastic")
# Timeout of Flower's own strategies by default.
_HOST_SECONDS = 3600.0


@dataclass(frozen=True)
class Simulation:
    """A scenario and the folders of its files.

    Attributes
    ----------
    scenario : Scenario
        The scenario to run.
    directory : Path
        Folder of the cost profile, clients' state and finished cells.
    data_root : str or None
        Folder of datasets.
    resume : bool
        Whether finished cells in ``directory`` are reused, and the others run with its costs.
    """

    scenario: Scenario
    directory: Path
    data_root: str | None = None
    resume: bool = False

    @property
    def state_directory(self) -> Path:
        """Folder of the clients' state between rounds."""
        return self.directory / "state"

    @property
    def profile_file(self) -> Path:
        """File of the measured costs."""
        return self.directory / "profile.json"

    @property
    def choosing_file(self) -> Path:
        """File of the costs of choosing, beside the profile."""
        return self.directory / "choosing.json"

    def result_file(self, method: str, seed: int) -> Path:
        """Return the file of a finished cell."""
        return self.directory / "cells" / f"{method}-{seed}.json"


Show: TypeAlias = Callable[[Sequence[RunResult], Sequence[TensorGroup], RunResult | None], object]
"""Called with the finished cells, the tensor groups, and the cell that is running, if any."""


def run_methods(
    simulation: Simulation,
    grid: Grid,
    progress: Progress,
    show: Show = lambda *_: None,
) -> tuple[list[RunResult], tuple[TensorGroup, ...]]:
    """Run all methods and seeds, storing each finished cell; ``show`` is called after each test and each cell."""
    torch.set_num_threads(1)
    scenario = simulation.scenario
    profile, choosing = _costs(simulation)
    cells = []
    for seed in scenario.seeds:
        for method in scenario.methods:
            path = simulation.result_file(method.name, seed)
            progress.cell(method.name, seed, scenario.training.rounds)
            if simulation.resume and path.exists():
                cells.append(_finished_cell(path, scenario.fingerprint(method)))
                continue
            cell = run_method(
                simulation, grid, progress, method, seed, profile, choosing,
                tested=lambda running: show(cells, profile.graph.groups, running),
            )  # fmt: skip
            write_atomically(path, cell.to_json().encode())
            cells.append(cell)
            show(cells, profile.graph.groups, None)
    return cells, profile.graph.groups


def _costs(simulation: Simulation) -> tuple[CostProfile, ChoosingCosts]:
    """Return the costs of steps and of choosing: those of a resumed run, completed by new measurements.

    So all methods are compared by the same costs, whether they ran before an interruption or after it.
    """
    scenario, data_root = simulation.scenario, simulation.data_root
    goes_on = simulation.resume and simulation.profile_file.exists()
    known = load_profile(simulation.profile_file) if goes_on else None
    profile = measure_profile(scenario, data_root, known=known)
    save_profile(profile, simulation.profile_file)
    beside = simulation.choosing_file
    spent = ChoosingCosts.load(beside) if goes_on and beside.exists() else ChoosingCosts()
    choosing = measure_choosing(scenario, data_root, profile, spent)
    choosing.save(beside)
    return profile, choosing


def _finished_cell(path: Path, fingerprint: str) -> RunResult:
    try:
        cell = RunResult.from_json(path.read_text(errors="replace"))
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}") from None
    if cell.scenario != fingerprint:
        raise ScenarioError(
            f"{path} is the result of another scenario (data, model, training, fleet or this method differ): "
            "choose another folder, or leave out --resume"
        )
    return cell


def run_method(
    simulation: Simulation,
    grid: Grid,
    progress: Progress,
    method: MethodSection,
    seed: int,
    profile: CostProfile,
    choosing: ChoosingCosts | None = None,
    tested: Callable[[RunResult], object] = lambda _: None,
) -> RunResult:
    """Run one method with one seed; without ``choosing`` nothing is charged for cost profiles and plans.

    The clients of each round depend only on the seed, on any engine. ``tested`` is called after each test, with the
    result so far.
    """
    scenario = simulation.scenario
    cell = RunResult(
        method.name,
        seed,
        scenario=scenario.fingerprint(method),
        labels=label_counts(scenario, simulation.data_root, seed),
    )
    # Client state of an earlier or interrupted run in this folder would influence this one.
    state_directory = simulation.state_directory / method.name / str(seed)
    shutil.rmtree(state_directory, ignore_errors=True)
    model = method_model(scenario, method, simulation.data_root, seed)
    evaluate_fn = _evaluation(simulation, progress, cell, model, tested)
    supplied = _supplied(simulation, grid, method, profile)
    grid = on_fleet(scenario, supplied, cell)
    unequal = grid if isinstance(grid, UnequalGrid) else None
    # On this grid the wait for an answer is simulated time.
    timeout = _HOST_SECONDS if unequal is None else float("inf")
    told = _bookkeeping(
        scenario,
        cell,
        profile,
        lambda last: strategy.runs_until(last),
        choosing,
        None if unequal is None else lambda: unequal.began,
    )
    strategy = method_strategy(scenario, method, seed, told)
    initial = as_record(weights_of(model, Manifest.of(model)))
    try:
        if method.round_zero != "none":
            # The global model until round zero is over.
            evaluate_fn(0, initial)
        strategy.start(
            grid=grid,
            timeout=timeout,
            initial_arrays=initial,
            num_rounds=scenario.training.rounds,
            train_config=ConfigRecord(
                {
                    "scenario": scenario.to_json(),
                    "method": method.name,
                    "seed": seed,
                    "choosing": "" if choosing is None else choosing.to_json(),
                    "state-dir": str(simulation.state_directory.absolute()),
                    "data-root": simulation.data_root or "",
                }
            ),
            evaluate_fn=evaluate_fn,
        )
    except _TimeIsUp:
        pass
    found = state_directory.glob(f"*/{CHARGES}")
    cell.charged(Charges.sum(Charges.load(path) for path in sorted(found)))
    cell.machines = supplied.machines
    return cell


def _supplied(
    simulation: Simulation, grid: Grid, method: MethodSection, profile: CostProfile
) -> SuppliedGrid:
    """Return a grid that sends costs to clients, and on a cluster also their files."""
    scenario, data_root = simulation.scenario, simulation.data_root

    def costs(read: str) -> CostProfile:
        return profile_at(scenario, data_root, method.peer, profile, read) if read else profile

    folder = simulation.state_directory if on_a_cluster() else None
    return SuppliedGrid(grid, costs, folder)


@lru_cache(maxsize=8)
def profile_at(
    scenario: Scenario, data_root: str | None, peer: str | None, profile: CostProfile, read: str
) -> CostProfile:
    """Return the costs of a model that ends where its head reads; measured once for all methods that use it.

    Its seconds are those of the host at the time when the whole model was measured.
    """
    method = next(each for each in scenario.methods if each.peer == peer)
    shorter = method_model(scenario, method, data_root, 0, read)
    return measured_beside(scenario, data_root, profile, shorter)


class _TimeIsUp(Exception):
    """Raised to end a run whose simulated time is over; Flower only counts rounds."""


def _evaluation(
    simulation: Simulation,
    progress: Progress,
    cell: RunResult,
    model: nn.Module,
    tested: Callable[[RunResult], object],
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return a function with which the server tests the global model."""
    training = simulation.scenario.training
    manifest = Manifest.of(model)
    batches = test_batches(simulation.scenario, simulation.data_root)

    models = {"": (model, manifest)}

    def test(weights: Weights, server_round: int) -> tuple[float, float]:
        read = places_of(weights)
        if read not in models:
            method = simulation.scenario.method_named(cell.method)
            made = method_model(simulation.scenario, method, simulation.data_root, cell.seed, read)
            models[read] = made, Manifest.of(made)
        model, manifest = models[read]
        load_weights(model, manifest, weights)
        counted = Counter[tuple[int, bool]]()

        def count(outputs: Any, targets: Any) -> dict[str, float]:
            if isinstance(outputs, Tensor) and outputs.ndim == 2:
                right = (outputs.argmax(1) == targets).tolist()
                counted.update(zip(targets.tolist(), right, strict=True))
            return _per_place(outputs, targets)

        result = evaluate(model, classification_loss, batches, metrics_fn=count)
        cell.classes = [
            (counted[each, True], counted[each, True] + counted[each, False])
            for each in range(len(cell.labels[0]) if cell.labels else 0)
        ]
        accuracy = result.metrics.get("accuracy", result.accuracy)
        if accuracy is None:
            raise ModelError(
                "a simulation compares accuracies, and this model's outputs in eval mode are no class scores of "
                "shape (batch, classes), or one more axis for places: let it return those"
            )
        return accuracy, result.loss

    ends = simulation.scenario.method_named(cell.method).plan == "none"
    after_round = (
        _by_rounds(training, cell, test, progress)
        if training.tests is None
        else TimedTests(training, cell, test, progress.round).after_round
    )

    before = -1.0

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        nonlocal before
        weights = as_arrays(arrays)
        # If no steps are taken, later rounds change nothing, nor do they once the head reads the input only: such
        # rounds take no time.
        limit = training.simulated_seconds
        stands = limit is not None and cell.simulated_seconds == before
        ended, before = server_round > 0 and (ends or stands), cell.simulated_seconds
        found = after_round(training.rounds if ended else server_round, weights)
        if found is not None:
            tested(cell)
        if limit is not None and (cell.simulated_seconds >= limit or ended):
            raise _TimeIsUp
        return None if found is None else MetricRecord({"accuracy": found[0], "loss": found[1]})

    return evaluate_fn


def _per_place(outputs: object, targets: object) -> dict[str, float]:
    """Return the share of correct classes if there is one class per place, as in a language model."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return {}
    if outputs.ndim < 3 or targets.shape != (len(outputs), *outputs.shape[2:]):
        return {}
    return {"accuracy": float((outputs.argmax(1) == targets).float().mean())}


def _by_rounds(
    training: TrainingSection, cell: RunResult, test: Test, progress: Progress
) -> Callable[[int, Weights], tuple[float, float] | None]:
    """Return a function that tests the model after every ``evaluate_every`` rounds and at the end."""

    def after_round(server_round: int, weights: Weights) -> tuple[float, float] | None:
        limit = training.simulated_seconds
        over = limit is not None and cell.simulated_seconds >= limit
        last = over or server_round == training.rounds
        if not last and server_round % training.evaluate_every:
            return None
        accuracy, loss = test(weights, server_round)
        cell.evaluated(server_round, accuracy, loss)
        progress.round(server_round, accuracy, loss, cell.simulated_seconds)
        return accuracy, loss

    return after_round


def _bookkeeping(
    scenario: Scenario,
    cell: RunResult,
    profile: CostProfile,
    runs_until: Callable[[int], None],
    choosing: ChoosingCosts | None,
    round_began: Callable[[], float] | None = None,
) -> Callable[[RoundRecord], None]:
    """Return a function that records each round in the cell, and stops the run when simulated time is up.

    Flower's servers know the number of rounds. If time limits the run, the last round is the one after which
    another round, and solving for a head after it, would end too late.
    """
    limit, took = scenario.training.simulated_seconds, {True: 0.0, False: 0.0}

    def on_round(record: RoundRecord) -> None:
        began = cell.simulated_seconds if round_began is None else round_began()
        for each in record.rejected:
            if NO_DATA in each.reason:
                raise ScenarioError(each.reason)
        late = [each for each in record.rejected if LATE in each.reason]
        # A client that stays out has received the model first, so a round without updates takes time as well.
        slowest = min(client.device.downlink_bytes_per_second for client in scenario.clients)
        told = record.downlink_bytes / slowest if record.rejected else 0.0
        done = [_client_round(reply) for reply in record.accepted]
        at_least = round_seconds((), deadline=record.deadline, missing=bool(late), told=told)
        lost = record.downlink_total_bytes - sum(each.downlink_bytes for each in done)
        left_out = len(record.rejected)
        if record.head_features or record.ranked_features:
            costs = HeadCosts() if choosing is None else choosing.of_a_head
            cell.spent["simulated_seconds"] += costs.on_server(
                record.head_features,
                record.head_penalty,
                record.ranked_features,
                [each.num_examples for each in record.accepted],
            )
        starts = cell.simulated_seconds if round_began is None else began
        cell.spend(done, scenario.clients, lost, left_out, at_least, starts)
        if record.trains:
            cell.cover(done, scenario.clients, profile.graph.groups)
        cell.left_out(record.server_round, [each.reason for each in record.rejected])
        cell.cut_is(record.cut)
        took[record.trains] = cell.simulated_seconds - began
        over = limit is not None and cell.simulated_seconds + sum(took.values()) > limit
        if record.trains and over:
            runs_until(record.server_round)

    return on_round


def _client_round(reply: AcceptedReply) -> ClientRound:
    metrics = reply.metrics
    return ClientRound(
        client=int(metrics["client"]),
        tensors=frozenset(name.removeprefix(f"{BODY}.") for name in reply.steps),
        host_seconds=metrics["predicted-seconds"],
        step_seconds=metrics["step-seconds"],
        steps=int(metrics["steps"]),
        requested_steps=int(metrics["requested-steps"]),
        uplink_bytes=reply.uplink_bytes,
        downlink_bytes=reply.downlink_bytes,
        features_found=int(metrics.get("features-found", 0)),
        features_computed=int(metrics.get("features-computed", 0)),
        peak_bytes=metrics.get(PEAK_BYTES, 0.0),
    )
