"""Ten devices of which one or two lie in ways that a rule does not look at: what each rule makes of it."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_elastic.profiling import CostProfile, save_profile
from fl_elastic.update import Manifest, PartialUpdate, encode
from fl_elastic.update.manifest import Role
from fl_elastic_simulations.benchmarks.federation import Silent
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.hostile import Attack, hostile
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.quiet import quiet_log
from fl_elastic_simulations.engine.server import Simulation, run_cell
from fl_elastic_simulations.engine.workload import measure_profile, scenario_model
from fl_elastic_simulations.scenario.scenario import Scenario

__all__ = ["LIES", "RULES", "Lie", "bench_liars"]

SEED = 0
RULES = ("contributors", "median", "trimmed_mean", "norm_clipping", "krum")
_BAD = {0: (), 1: (0,), 2: (0, 5)}
_VARIANCE = "running_var"
_SCENARIO: dict[str, Any] = {
    "title": "Ten devices, of which some lie",
    "seeds": [SEED],
    "data": {"dataset": "digits", "partition": "dirichlet", "alpha": 1.0, "min_examples": 20},
    "model": {"name": "digits_cnn_bn"},
    "training": {"rounds": 8, "local_steps": 8, "batch_size": 16, "learning_rate": 0.05},
    "fleet": [{"device": "pi_5", "count": 10, "speedup": 1.0}],
    "methods": [],
    "method": {},
    "target": {},
}


@dataclass(frozen=True)
class Lie:
    """What bad clients send, and what else is special about the run.

    Attributes
    ----------
    attack : callable, optional
        What they make of their honest update.
    others : callable, optional
        What becomes of everybody else's.
    normalise_steps : bool
        Whether the server divides by the steps that clients claim.
    elastic : bool
        Whether half of the fleet is given half of the time, so that tensors have fewer contributors.
    rules : tuple of str
        By which it is tried.
    """

    attack: Attack | None = None
    others: Attack | None = None
    normalise_steps: bool = False
    elastic: bool = False
    rules: tuple[str, ...] = RULES


def _sent(change: Callable[[PartialUpdate, Manifest], PartialUpdate]) -> Attack:
    return lambda update, manifest: encode(change(update, manifest), manifest)


def _scaled(update: PartialUpdate, factors: dict[str, float]) -> PartialUpdate:
    deltas = {
        name: np.asarray(factors.get(name, 1.0) * delta, np.float32)
        for name, delta in update.deltas.items()
    }
    return replace(update, deltas=deltas)


def _negative_variance(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    """Honest parameters; every running variance five below what the client observed."""
    deltas = {n: d - 5.0 if n.endswith(_VARIANCE) else d for n, d in update.deltas.items()}
    return replace(update, deltas=deltas)


def _huge_variance(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    deltas = {n: d + 1e6 if n.endswith(_VARIANCE) else d for n, d in update.deltas.items()}
    return replace(update, deltas=deltas)


def _outvoting(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    """Go the opposite way, in the name of a hundred million examples."""
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
"""By what the liars say; those without an attack are what the others compare with."""


def bench_liars(results: Results, tell: Callable[[str], None] = lambda line: None) -> None:
    """Train digits on ten devices under every lie by one and by two of them, by every rule."""
    torch.set_num_threads(1)
    profile = measure_profile(_scenario(RULES[0], LIES["none"]), None)
    for name, lie in LIES.items():
        for liars in (0,) if lie.attack is None else (1, 2):
            for rule in lie.rules:
                row = f"{rule} | {name} | {liars}"
                if row in results.rows:
                    continue
                accuracy, rejected = _cell(profile, rule, lie, liars)
                results.add(row, {"accuracy": accuracy, "rejected": rejected})
                tell(f"{row}: {accuracy:.3f}")


def _scenario(rule: str, lie: Lie) -> Scenario:
    table: dict[str, Any] = json.loads(json.dumps(_SCENARIO))
    method = {"policy": "full", "rule": rule, "normalise_steps": lie.normalise_steps}
    if lie.elastic:
        method["policy"] = "elastic"
        table["fleet"] = [
            {"device": "pi_5", "count": 5, "speedup": 1.0},
            {"device": "pi_4b", "count": 5, "speedup": 2.0},
        ]
    table |= {"methods": [rule], "method": {rule: method}, "target": {"method": rule}}
    return Scenario.from_json(json.dumps(table))


def _cell(profile: CostProfile, rule: str, lie: Lie, liars: int) -> tuple[float, int]:
    """Return the final accuracy, and how many updates the server left out."""
    scenario = _scenario(rule, lie)
    manifest = Manifest.of(scenario_model(scenario, None, SEED))
    with (
        quiet_log(logging.CRITICAL),
        tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch,
    ):
        simulation = Simulation(scenario, Path(scratch))
        save_profile(profile, simulation.profile_file)
        app = hostile(simulated_client_app(), lie.attack, manifest, _BAD[liars], lie.others)
        grid = InProcessGrid(len(scenario.clients), app)
        (method,) = scenario.methods
        cell = run_cell(simulation, grid, Silent(), method, SEED, profile)
    return float(cell.history[-1]["accuracy"]), cell.rejected
