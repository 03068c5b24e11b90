"""Ten devices whose worlds change at different times: what it brings to know those who saw the change first."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import RegistryError
from fl_elastic.flower.stream_client import StreamClient
from fl_elastic.losses import classification_loss
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.registry import closest
from fl_elastic.streaming import (
    EverySamples,
    OnDrift,
    SampleStore,
    StreamLearner,
    StreamOptions,
)
from fl_elastic.streaming.joining import Interpolate, JoiningRule, Measured, Personal, Replace
from fl_elastic.streaming.learner_state import StateFolder
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.update import Manifest, weights_of
from fl_elastic_simulations.benchmarks.cells import add_missing
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.stream_recovery import (
    CLIENTS,
    DRIFTS,
    LENGTH,
    PIXELS,
    ClientScore,
    Task,
    adam,
    client_score,
    combined,
    copied,
    task_of,
    trained_at_home,
)
from fl_elastic_simulations.data.datasets import data_root_folder
from fl_elastic_simulations.engine.client_rounds import client_rounds
from fl_elastic_simulations.engine.quiet import quiet_log

__all__ = ["METHODS", "SEEDS", "bench_stream_federation", "stream_federation_cell"]

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Method:
    """How devices learn together.

    Parameters
    ----------
    joining : JoiningRule or None
        None for each by itself, with as many training steps.
    left : str
        What a round leaves for the learner; see `StreamClient`.
    """

    joining: JoiningRule | None = None
    left: str = "by_share"


METHODS = {
    "alone": Method(),
    "replace": Method(Replace()),
    "interpolate": Method(Interpolate(0.5)),
    "interpolate, replace after a drift": Method(Interpolate(0.5, after_drift=1.0)),
    "personal": Method(Personal()),
    "measured": Method(Measured()),
    "measured, trained": Method(Measured(), "trained"),
}
"""By name."""

# Rounds lie between two adaptations of the learners, each every 50 samples.
_EVERY, _FIRST, _STEPS = 50, 25, 20
_CAPACITY, _FADING, _POLICY = 2 * 2**20, 0.98, "full"


def bench_stream_federation(
    results: Results,
    data_root: str | Path | None = None,
    *,
    methods: Iterable[str] = METHODS,
    seeds: Iterable[int] = SEEDS,
    workers: int = 1,
    tell: Callable[[str], None] = print,
) -> None:
    """Run every method with every seed on Fashion-MNIST; finished cells are kept.

    Every device has a model that was trained on upright pictures, and learns from its own stream. Five of ten get
    pictures turned by 60 degrees from some moment on, one after the other; the others never do.

    Parameters
    ----------
    results : Results
        The table.
    data_root : path-like, optional
        Folder of the dataset.
    methods, seeds : iterable
        Which; all, if left out.
    workers : int
        Cells at a time.
    tell : callable
        Told of each finished cell.
    """
    chosen = list(methods)
    for name in chosen:
        if name not in METHODS:
            known = ", ".join(METHODS)
            raise RegistryError(
                f"unknown method {name!r}{closest(name, list(METHODS))}: known are {known}"
            )
    root = str(data_root_folder(data_root))
    cells = {f"{name} | {seed}": (name, seed, root) for seed in seeds for name in chosen}
    add_missing(
        results, stream_federation_cell, cells, workers, tell,
        lambda row: f"recovery {row['recovery']:.0f} samples, {row['cpu_seconds']:.0f} s",
    )  # fmt: skip
    for name in chosen:
        rows = {s: results.rows[f"{name} | {s}"] for s in SEEDS if f"{name} | {s}" in results.rows}
        alone = {s: results.rows[f"alone | {s}"] for s in rows if f"alone | {s}" in results.rows}
        if rows and len(rows) == len(alone):
            results.add(f"summary {name}", _means(rows))
            results.add(f"against alone {name}", _gains(rows, alone))


def stream_federation_cell(method: str, seed: int, root: str) -> dict[str, Any]:
    """Let all devices live through their streams; return how each fared."""
    torch.set_num_threads(1)
    started = time.process_time()
    task = task_of(seed, root)
    model = trained_at_home(task, seed)
    chosen, rounds = METHODS[method], (LENGTH - _FIRST) // _EVERY + 1
    with quiet_log(), tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch:
        fleet = _Fleet(task, model, Path(scratch), seed, chosen)
        if chosen.joining is None:
            for _ in range(rounds):
                for number in range(CLIENTS):
                    fleet.go_on(number)
                    fleet.learners[number].adapt()
        else:
            start = weights_of(model, Manifest.of(model))
            client_rounds(fleet.client, CLIENTS, start, rounds)
        for number in range(CLIENTS):
            fleet.go_on(number)
        fleet.close()
        scores = fleet.scores()
        taken = [each.rounds for each in fleet.learners]
    return {
        **combined(scores),
        "rounds_undone": sum(each.undone for each in taken),
        "rounds_taken": sum(each.taken for each in taken),
        "cpu_seconds": time.process_time() - started,
    }


class _Fleet:
    """Ten learners in folders of their own, at the same place of their streams."""

    def __init__(
        self, task: Task, model: nn.Module, scratch: Path, seed: int, method: Method
    ) -> None:
        self._task, self._seed, self._method = task, seed, method
        self._folders = [scratch / str(number) for number in range(CLIENTS)]
        self._profile = _costs(model)
        self._blank = model
        self._stores = [SampleStore(f / "samples.db", _CAPACITY, seed=seed) for f in self._folders]
        self._hits: list[list[bool]] = [[] for _ in range(CLIENTS)]
        self._alarms: list[list[int]] = [[] for _ in range(CLIENTS)]
        for folder in self._folders:
            StateFolder(folder).keep_profile(self._profile)
        self.learners = [self._learner(number) for number in range(CLIENTS)]

    def go_on(self, number: int) -> None:
        """Let a device observe its next samples."""
        x, y = self._task.x[number], self._task.y[number]
        learner, hits = self.learners[number], self._hits[number]
        until = len(hits) + (_EVERY if hits else _FIRST)
        for place in range(len(hits), min(until, LENGTH)):
            seen = learner.observe(x[place], int(y[place]), float(place))
            hits.append(bool(seen.correct))
            if seen.drift:
                self._alarms[number].append(place)

    def client(self, number: int) -> StreamClient:
        """Let a device observe its next samples; return its client for the round after them."""
        joining = self._method.joining
        assert joining is not None
        self.go_on(number)
        self.learners[number].save()
        return StreamClient(
            copied(self._blank), self._folders[number],
            budget=Budget(), joining=joining, left=self._method.left, optimizer_fn=adam,
            policy=_POLICY, steps=_STEPS, seed=self._seed * 1000 + number, options=_options(),
            profile=self._profile,
        )  # fmt: skip

    def scores(self) -> list[ClientScore]:
        """Return how each device fared."""
        places: list[int | None] = [*DRIFTS, *[None] * (CLIENTS - len(DRIFTS))]
        return [
            client_score(hits, drift, min(DRIFTS), alarms, _FADING)
            for hits, drift, alarms in zip(self._hits, places, self._alarms, strict=True)
        ]

    def close(self) -> None:
        """Close learners and stores."""
        for learner, store in zip(self.learners, self._stores, strict=True):
            learner.close()
            store.close()

    def _learner(self, number: int) -> StreamLearner:
        return StreamLearner(
            copied(self._blank), self._stores[number],
            budget=Budget(), policy=_POLICY, optimizer_fn=adam, loss_fn=classification_loss,
            trigger=EverySamples(_EVERY) | OnDrift(16), detector="adwin",
            state_dir=self._folders[number], seed=self._seed * 1000 + number, classes=range(10),
            options=StreamOptions(steps=_STEPS, save_every=0, training=_options()),
        )  # fmt: skip


def _options() -> TrainerOptions:
    # Plans go by the same measured costs in all cells; the clock of this machine is no part of what is compared.
    return TrainerOptions(timing=Timing(closed_loop=False, clock="cpu"))


def _costs(model: nn.Module) -> CostProfile:
    batch = torch.randn(32, 1, PIXELS, PIXELS), torch.arange(32) % 10
    return profile_model(copied(model), classification_loss, batch, optimizer_fn=adam, clock="cpu")


def _means(rows: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return means over seeds."""
    names = (
        "recovery", "recovered", "to_level", "late_to_level",
        "after_drift", "late_after_drift", "not_hit", "before_drift",
    )  # fmt: skip
    return {name: statistics.fmean(row[name] for row in rows.values()) for name in names}


def _gains(rows: dict[int, dict[str, Any]], alone: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what came of not being alone, with its standard deviation over seeds."""
    found: dict[str, Any] = {}
    for name in (
        "recovery",
        "to_level",
        "late_to_level",
        "after_drift",
        "late_after_drift",
        "not_hit",
    ):
        gains = [rows[seed][name] - alone[seed][name] for seed in rows]
        found[name] = statistics.fmean(gains)
        found[f"{name}_spread"] = statistics.stdev(gains) if len(gains) > 1 else None
    found["not_hit_worst"] = statistics.fmean(
        min(
            own - other
            for own, other in zip(rows[s]["not_hit_each"], alone[s]["not_hit_each"], strict=True)
        )
        for s in rows
    )
    return found
