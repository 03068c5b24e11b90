"""Test each aggregation rule on ten devices of which some lie."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fl_elastic.profiling import CostProfile
from fl_elastic.update import Manifest, PartialUpdate, encode
from fl_elastic.update.manifest import Role
from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.hostile import Attack, hostile
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.progress import Progress
from fl_elastic_simulations.engine.quiet import quiet_log
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation, run_method
from fl_elastic_simulations.engine.workload import measure_profile, scenario_model
from fl_elastic_simulations.scenario.scenario import Scenario

RULES = ("contributors", "median", "trimmed_mean", "norm_clipping", "krum")
_BAD = {0: (), 1: (0,), 2: (0, 5)}
_VARIANCE = "running_var"
_FAST = [{"device": "pi_5", "count": 10, "speedup": 1.0}]
_HALF = [
    {"device": "pi_5", "count": 5, "speedup": 1.0},
    {"device": "pi_4b", "count": 5, "speedup": 2.0},
]


@dataclass(frozen=True)
class Lie:
    """What bad clients send, and how the run differs from the others.

    Attributes
    ----------
    attack : callable, optional
        Encodes the update that a bad client sends, from its honest update. By default bad clients are honest.
    others : callable, optional
        Encodes the update that every other client sends, from its honest update. By default others are honest.
    normalise_steps : bool
        Whether the server divides an update by the number of steps that its client claims.
    elastic : bool
        Whether half of the fleet gets half of the time, so that some tensors have fewer contributors.
    rules : tuple of str
        Aggregation rules under which the lie is tried.
    """

    attack: Attack | None = None
    others: Attack | None = None
    normalise_steps: bool = False
    elastic: bool = False
    rules: tuple[str, ...] = RULES

    @property
    def liars(self) -> tuple[int, ...]:
        """Numbers of bad clients with which it is tried."""
        return (0,) if self.attack is None else (1, 2)


def _sent(change: Callable[[PartialUpdate, Manifest], PartialUpdate]) -> Attack:
    return lambda update, manifest: encode(change(update, manifest), manifest)


def _scaled(update: PartialUpdate, factors: dict[str, float]) -> PartialUpdate:
    deltas = {
        name: np.asarray(factors.get(name, 1.0) * delta, np.float32)
        for name, delta in update.deltas.items()
    }
    return replace(update, deltas=deltas)


def _negative_variance(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    """Return honest parameters, with every running variance five below what the client observed."""
    deltas = {n: d - 5.0 if n.endswith(_VARIANCE) else d for n, d in update.deltas.items()}
    return replace(update, deltas=deltas)


def _huge_variance(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    deltas = {n: d + 1e6 if n.endswith(_VARIANCE) else d for n, d in update.deltas.items()}
    return replace(update, deltas=deltas)


def _outvoting(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    """Return the opposite update, with a claim of a hundred million examples."""
    opposite = _scaled(update, dict.fromkeys(_parameters(manifest), -1.0))
    return replace(opposite, num_examples=100_000_000)


def _many_steps(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    return replace(update, steps=dict.fromkeys(update.deltas, 1_000_000))


def _alone(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    return _scaled(update, {_first(manifest): 1000.0})


def _without_first(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    return _without(update, _first(manifest))


def _without_last(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    return _without(update, _parameters(manifest)[-1])


def _without(update: PartialUpdate, left_out: str) -> PartialUpdate:
    deltas = {name: delta for name, delta in update.deltas.items() if name != left_out}
    return replace(update, deltas=deltas, steps={name: update.steps[name] for name in deltas})


def _nothing(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    return replace(update, deltas={}, steps={}, parts={})


def _parameters(manifest: Manifest) -> list[str]:
    return [name for name in manifest.names if manifest.role(name) is Role.PARAMETER]


def _first(manifest: Manifest) -> str:
    return _parameters(manifest)[0]


LIES: dict[str, Lie] = {
    "none": Lie(),
    "running variance -5": Lie(_sent(_negative_variance)),
    "running variance a million": Lie(_sent(_huge_variance)),
    "opposite, a hundred million examples": Lie(_sent(_outvoting)),
    "steps normalised, none": Lie(normalise_steps=True),
    "steps normalised, a million claimed": Lie(_sent(_many_steps), normalise_steps=True),
    "first tensor of nobody": Lie(others=_sent(_without_first)),
    "first tensor of the liars alone, a thousandfold": Lie(_sent(_alone), _sent(_without_first)),
    "a tensor left out": Lie(_sent(_without_last), rules=("krum",)),
    "an empty update": Lie(_sent(_nothing), rules=("krum",)),
    "half the fleet at half the time, none": Lie(elastic=True),
}
"""Lies by their name in the table; those without an attack are the baselines."""


class BadClients(Benchmark):
    """Accuracy of each aggregation rule if one or two of ten devices lie about values that no rule checks."""

    name = "bad-clients"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return every lie under every rule, from each number of liars."""
        return {
            f"{rule} | {name} | {liars}": (rule, name, liars)
            for name, lie in LIES.items()
            for liars in lie.liars
            for rule in lie.rules
        }

    def run(self, rule: str, name: str, liars: int) -> Row:
        """Train on digits under one lie, with one rule and one seed."""
        torch.set_num_threads(1)
        run = trained(rule, LIES[name], liars)
        return {"accuracy": float(run.history[-1]["accuracy"]), "rejected": run.rejected}

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return accuracies in % by lie and rule."""

        def accuracy(name: str) -> str:
            return f"{100 * rows[name]['accuracy']:.1f}" if name in rows else ""

        lies = [
            {"what liars say": name, "liars of ten": str(liars)}
            | {rule: accuracy(f"{rule} | {name} | {liars}") for rule in RULES}
            for name, lie in LIES.items()
            for liars in lie.liars
        ]
        return {"lies": pd.DataFrame(lies).set_index("what liars say")}


def scenario_of(rule: str, lie: Lie) -> Scenario:
    """Return the scenario that a lie is run in."""
    policy = "elastic" if lie.elastic else "full"
    method = {"policy": policy, "rule": rule, "normalise_steps": lie.normalise_steps}
    table = {
        "title": "Ten devices, of which some are bad",
        "data": {"dataset": "digits", "partition": "dirichlet", "alpha": 1.0, "min_examples": 20},
        "model": {"name": "digits_cnn_bn"},
        "training": {"rounds": 8, "local_steps": 8, "batch_size": 16, "learning_rate": 0.05},
        "fleet": _HALF if lie.elastic else _FAST,
        "methods": [rule],
        "method": {rule: method},
        "target": {"method": rule},
    }
    return Scenario.from_json(json.dumps(table))


@cache
def _profile() -> CostProfile:
    return measure_profile(scenario_of("contributors", LIES["none"]), None)


def trained(rule: str, lie: Lie, liars: int, rounds: int | None = None) -> RunResult:
    """Run the scenario of a lie with this number of liars, by default for all its rounds."""
    scenario = scenario_of(rule, lie)
    if rounds is not None:
        scenario = replace(scenario, training=replace(scenario.training, rounds=rounds))
    manifest = Manifest.of(scenario_model(scenario, None, 0))
    with (
        quiet_log(logging.CRITICAL),
        tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch,
    ):
        app = hostile(simulated_client_app(), lie.attack, manifest, _BAD[liars], lie.others)
        grid = InProcessGrid(len(scenario.clients), app)
        simulation, (method,) = Simulation(scenario, Path(scratch)), scenario.methods
        return run_method(simulation, grid, Progress(), method, 0, _profile())


BENCHMARK = BadClients()
