"""Test each aggregation rule on ten devices of which some are hostile, broken or lie."""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from fl_elastic.profiling import CostProfile
from fl_elastic.update import Manifest, PartialUpdate, encode
from fl_elastic.update.frame import Kind, pack, unpack
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

__all__ = ["ATTACKS", "BENCHMARK", "LIES", "BadClients", "Lie", "scenario_of"]

RULES = ("contributors", "all", "median", "trimmed_mean", "norm_clipping")
LIARS_RULES = ("contributors", "median", "trimmed_mean", "norm_clipping", "krum")
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
    rules: tuple[str, ...] = LIARS_RULES


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


def _scaled_by(factor: float) -> Attack:
    def attack(update: PartialUpdate, manifest: Manifest) -> bytes:
        return encode(_scaled(update, dict.fromkeys(update.deltas, factor)), manifest)

    return attack


def _not_a_number(update: PartialUpdate, manifest: Manifest) -> bytes:
    # `encode` refuses NaN, so the update is packed by hand, as a hostile client would do.
    kind, header, payload = unpack(encode(update, manifest), manifest, Kind.UPDATE)
    return pack(kind, header, [np.full(len(payload) // 4, np.nan, "<f4").tobytes()])


def _stale(update: PartialUpdate, manifest: Manifest) -> PartialUpdate:
    return replace(update, base_version=max(update.base_version - 3, 0))


ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "not a number": _not_a_number,
    "a million times": _scaled_by(1e6),
    "sign flipped": _scaled_by(-1.0),
    "sign flipped, tenfold": _scaled_by(-10.0),
    "stale": _sent(_stale),
}
"""Attacks by their name in the table: what two of ten clients send."""


class BadClients(Benchmark):
    """Accuracy of each aggregation rule if some of ten devices are hostile or broken, or lie.

    An attack comes from two devices; its accuracy is the mean over three seeds. A lie concerns values that a rule
    does not check; it comes from one or two devices and is run with one seed.
    """

    name = "bad-clients"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return every attack and every lie under every rule."""
        attacks = {f"{rule} | {each}": (rule, each) for each in ATTACKS for rule in RULES}
        lies = {
            f"{rule} | {name} | {liars}": (rule, name, liars)
            for name, lie in LIES.items()
            for liars in ((0,) if lie.attack is None else (1, 2))
            for rule in lie.rules
        }
        return {**attacks, **lies}

    def run(self, rule: str, name: str, liars: int | None = None) -> Row:
        """Train on digits under one attack or lie, with one rule."""
        torch.set_num_threads(1)
        if liars is not None:
            lie = LIES[name]
            run = trained(scenario_of(rule, lie), rule, 0, lie.attack, _BAD[liars], lie.others)
            return {"accuracy": float(run.history[-1]["accuracy"]), "rejected": run.rejected}
        runs = [
            trained(scenario_of(rule), rule, seed, ATTACKS[name], _BAD[2]) for seed in self.seeds
        ]
        ends = [statistics.fmean(row["accuracy"] for row in run.history[-3:]) for run in runs]
        return {
            "accuracy": statistics.fmean(ends),
            "spread": statistics.stdev(ends),
            "rejected": sum(run.rejected for run in runs),
        }

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return accuracies in %: of attacks by rule and attack, of lies by lie and rule."""

        def accuracy(name: str) -> str:
            return f"{100 * rows[name]['accuracy']:.1f}" if name in rows else ""

        attacks = pd.DataFrame(
            {each: {rule: accuracy(f"{rule} | {each}") for rule in RULES} for each in ATTACKS}
        )
        lies = [
            {"what liars say": name, "liars of ten": str(liars)}
            | {rule: accuracy(f"{rule} | {name} | {liars}") for rule in LIARS_RULES}
            for name, lie in LIES.items()
            for liars in ((0,) if lie.attack is None else (1, 2))
        ]
        return {
            "attacks": attacks.rename_axis("rule"),
            "lies": pd.DataFrame(lies).set_index("what liars say"),
        }


def scenario_of(rule: str, lie: Lie | None = None) -> Scenario:
    """Return the scenario that a lie is run in; without a lie, the scenario of the attacks."""
    elastic = lie is None or lie.elastic
    method: dict[str, Any] = {"policy": "elastic" if elastic else "full", "rule": rule}
    if lie is not None:
        method["normalise_steps"] = lie.normalise_steps
    table = {
        "title": "Ten devices, of which some are bad",
        "seeds": [0, 1, 2],
        "data": {"dataset": "digits", "partition": "dirichlet", "alpha": 1.0, "min_examples": 20},
        "model": {"name": "digits_cnn" if lie is None else "digits_cnn_bn"},
        "training": {
            "rounds": 12 if lie is None else 8,
            "local_steps": 8,
            "batch_size": 16,
            "learning_rate": 0.05,
        },
        "fleet": _HALF if elastic else _FAST,
        "methods": [rule],
        "method": {rule: method},
        "target": {"method": rule},
    }
    return Scenario.from_json(json.dumps(table))


@cache
def _profile(model: str) -> CostProfile:
    lie = None if model == "digits_cnn" else LIES["none"]
    return measure_profile(scenario_of("contributors", lie), None)


def trained(
    scenario: Scenario,
    rule: str,
    seed: int,
    attack: Attack | None,
    bad: Collection[int],
    others: Attack | None = None,
) -> RunResult:
    """Run a scenario with the clients of the numbers ``bad`` sending the attack, and return its result."""
    method = next(each for each in scenario.methods if each.name == rule)
    manifest = Manifest.of(scenario_model(scenario, None, seed))
    profile = _profile(scenario.model.name)
    with (
        quiet_log(logging.CRITICAL),
        tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch,
    ):
        simulation = Simulation(scenario, Path(scratch))
        app = hostile(simulated_client_app(), attack, manifest, bad, others)
        grid = InProcessGrid(len(scenario.clients), app)
        return run_method(simulation, grid, Progress(), method, seed, profile)


BENCHMARK = BadClients()
