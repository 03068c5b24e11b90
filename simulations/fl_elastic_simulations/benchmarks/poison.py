"""A fleet of which a fifth is hostile or broken: what each aggregation rule makes of it."""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_elastic.profiling import CostProfile, save_profile
from fl_elastic.update import Manifest, PartialUpdate, encode
from fl_elastic.update.frame import Kind, pack, unpack
from fl_elastic_simulations.benchmarks.federation import Silent
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.hostile import Attack, hostile
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.quiet import quiet_log
from fl_elastic_simulations.engine.server import Simulation, run_cell
from fl_elastic_simulations.engine.workload import measure_profile, scenario_model
from fl_elastic_simulations.scenario.scenario import Scenario

__all__ = ["ATTACKS", "RULES", "bench_poison"]

SEEDS = (0, 1, 2)
RULES = ("contributors", "all", "median", "trimmed_mean", "norm_clipping")
_BAD = (0, 5)
_SCENARIO: dict[str, Any] = {
    "title": "Ten devices, two of them hostile",
    "seeds": list(SEEDS),
    "data": {"dataset": "digits", "partition": "dirichlet", "alpha": 1.0, "min_examples": 20},
    "model": {"name": "digits_cnn"},
    "training": {"rounds": 12, "local_steps": 8, "batch_size": 16, "learning_rate": 0.05},
    "fleet": [{"device": "pi_5", "count": 5, "speedup": 1.0}, {"device": "pi_4b", "count": 5, "speedup": 2.0}],
    "methods": list(RULES),
    "method": {rule: {"policy": "elastic", "rule": rule} for rule in RULES},
    "target": {"method": "contributors"},
}  # fmt: skip


def _scaled(factor: float) -> Attack:
    def attack(update: PartialUpdate, manifest: Manifest) -> bytes:
        return encode(_changed(update, factor), manifest)

    return attack


def _not_a_number(update: PartialUpdate, manifest: Manifest) -> bytes:
    # `encode` refuses such numbers, so a hostile client would write them by itself.
    kind, header, payload = unpack(encode(update, manifest), manifest, Kind.UPDATE)
    return pack(kind, header, [np.full(len(payload) // 4, np.nan, "<f4").tobytes()])


def _stale(update: PartialUpdate, manifest: Manifest) -> bytes:
    old = PartialUpdate(
        update.deltas, update.steps, update.num_examples, max(update.base_version - 3, 0)
    )
    return encode(old, manifest)


def _changed(update: PartialUpdate, factor: float) -> PartialUpdate:
    deltas = {name: factor * delta for name, delta in update.deltas.items()}
    return PartialUpdate(deltas, update.steps, update.num_examples, update.base_version)


ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "not a number": _not_a_number,
    "a million times": _scaled(1e6),
    "sign flipped": _scaled(-1.0),
    "sign flipped, tenfold": _scaled(-10.0),
    "stale": _stale,
}
"""By what the bad clients send."""


def bench_poison(results: Results) -> None:
    """Train digits on ten devices under every attack by two of them, by every rule, three seeds."""
    torch.set_num_threads(1)
    scenario = Scenario.from_json(json.dumps(_SCENARIO))
    profile = measure_profile(scenario, None)
    for attack in ATTACKS:
        for rule in RULES:
            if f"{rule} | {attack}" in results.rows:
                continue
            cells = [_cell(scenario, profile, rule, attack, seed) for seed in SEEDS]
            accuracies = [accuracy for accuracy, _ in cells]
            results.add(
                f"{rule} | {attack}",
                {
                    "accuracy": statistics.fmean(accuracies),
                    "spread": statistics.stdev(accuracies),
                    "rejected": sum(rejected for _, rejected in cells),
                },
            )


def _cell(
    scenario: Scenario, profile: CostProfile, rule: str, attack: str, seed: int
) -> tuple[float, int]:
    """Return the final accuracy, and how many updates the server left out."""
    method = next(each for each in scenario.methods if each.name == rule)
    manifest = Manifest.of(scenario_model(scenario, None, seed))
    with (
        quiet_log(logging.CRITICAL),
        tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch,
    ):
        simulation = Simulation(scenario, Path(scratch))
        save_profile(profile, simulation.profile_file)
        app = hostile(simulated_client_app(), ATTACKS[attack], manifest, _BAD)
        grid = InProcessGrid(len(scenario.clients), app)
        cell = run_cell(simulation, grid, Silent(), method, seed, profile)
    return statistics.fmean(row["accuracy"] for row in cell.history[-3:]), cell.rejected
