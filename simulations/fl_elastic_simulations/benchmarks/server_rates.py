"""Server rates above 1, of a model with running statistics and of one without: gain and risk."""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.profiling import CostProfile, save_profile
from fl_elastic_simulations.benchmarks.federation import Silent
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.engine import server as simulated_server
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.methods import method_strategy
from fl_elastic_simulations.engine.quiet import quiet_log
from fl_elastic_simulations.engine.server import Simulation, run_cell
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario.scenario import Scenario

__all__ = ["SETTINGS", "bench_server_rates"]

SEEDS = (0, 1)
MODELS = ("digits_cnn_bn", "digits_cnn")
SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "rate 1": ({}, False),
    "agreement 1.5": ({"server_optimizer": "agreement", "server_rate": 1.5}, False),
    "agreement 1.5, extrapolated": ({"server_optimizer": "agreement", "server_rate": 1.5}, True),
    "rate 3": ({"server_optimizer": "sgd", "server_rate": 3.0}, False),
    "rate 3, extrapolated": ({"server_optimizer": "sgd", "server_rate": 3.0}, True),
}
"""By name: the method's options, and whether a model with statistics is taken further and never back."""

_SCENARIO: dict[str, Any] = {
    "title": "Server rates above 1",
    "seeds": list(SEEDS),
    "data": {"dataset": "digits", "partition": "dirichlet", "alpha": 0.3, "min_examples": 20},
    "training": {
        "rounds": 20, "local_steps": 8, "batch_size": 16, "learning_rate": 0.05, "client_fraction": 0.5,
    },
    "fleet": [{"device": "pi_5", "count": 10, "speedup": 1.0}],
    "methods": ["full"],
    "target": {"method": "full"},
}  # fmt: skip


def bench_server_rates(results: Results, tell: Callable[[str], None] = lambda line: None) -> None:
    """Train digits on half of ten devices a round, with and without running statistics, at every rate."""
    torch.set_num_threads(1)
    for model in MODELS:
        profile = measure_profile(_scenario(model, {}), None)
        for name, (options, extrapolate) in SETTINGS.items():
            row = f"{model} | {name}"
            if row in results.rows:
                continue
            curves = [_curve(profile, model, options, extrapolate, seed) for seed in SEEDS]
            falls = [max(a - b for a, b in pairwise(c)) for c in curves]
            results.add(
                row,
                {
                    "accuracy": statistics.fmean(statistics.fmean(c[-3:]) for c in curves),
                    "largest_fall": max(falls),
                },
            )
            tell(f"{row}: {results.rows[row]}")


def _scenario(model: str, options: dict[str, Any]) -> Scenario:
    method = {"policy": "full"} | options
    return Scenario.from_json(
        json.dumps(_SCENARIO | {"model": {"name": model}, "method": {"full": method}})
    )


def _curve(
    profile: CostProfile, model: str, options: dict[str, Any], extrapolate: bool, seed: int
) -> list[float]:
    """Return the accuracy after each round."""

    def strategy(*arguments: Any) -> PartialUpdates:
        made = method_strategy(*arguments)
        made.merge = replace(made.merge, extrapolate=extrapolate)
        if extrapolate:
            made.guard.jumped = lambda *_: ""  # type: ignore[method-assign]
        return made

    scenario = _scenario(model, options)
    with (
        quiet_log(logging.CRITICAL),
        tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch,
        patch.object(simulated_server, "method_strategy", strategy),
    ):
        simulation = Simulation(scenario, Path(scratch))
        save_profile(profile, simulation.profile_file)
        grid = InProcessGrid(len(scenario.clients), simulated_client_app())
        (method,) = scenario.methods
        cell = run_cell(simulation, grid, Silent(), method, seed, profile)
    return [float(row["accuracy"]) for row in cell.history]
