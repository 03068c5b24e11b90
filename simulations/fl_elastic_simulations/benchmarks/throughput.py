"""Measure the costs of a client-round besides its training: this engine, Flower's engine, and a bare loop."""

from __future__ import annotations

import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from fl_elastic.named_models import build_model
from fl_elastic_simulations.benchmarks.benchmark import (
    Benchmark,
    Request,
    Row,
    Rows,
    chosen_tasks,
)
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.data.datasets import Dataset
from fl_elastic_simulations.engine.plain_rounds import plain_rounds
from fl_elastic_simulations.engine.progress import Progress
from fl_elastic_simulations.engine.quiet import quiet_log
from fl_elastic_simulations.engine.server import Simulation
from fl_elastic_simulations.engine.simulate import simulate
from fl_elastic_simulations.scenario.scenario import Scenario

_CLASSES, _FEATURES, _PIXELS, _RATE = 10, 784, 28, 0.05
_TURNS = 3
# Number of replies before counting begins; by then all processes have loaded everything.
_WARM = 40
LOOP, FULL, ELASTIC, FLOWER = _WAYS = "bare loop", "full", "elastic", "Flower, plain client"


@dataclass(frozen=True)
class Task:
    """A federation of clients of equal size."""

    data: str
    model: str
    clients: int
    each_round: int
    rounds: int
    examples: int
    batch: int
    steps: int


TASKS = {
    "linear": Task("vectors", "Linear", 1000, 10, 32, 50, 10, 5),
    "cnn": Task("pictures", "small_cnn", 100, 10, 12, 100, 20, 5),
    "10,000 registered": Task("vectors_of_many", "Linear", 10_000, 20, 16, 10, 10, 5),
}


class Linear(nn.Module):
    """Logistic regression."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_FEATURES, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        scores: torch.Tensor = self.head(x)
        return scores


def vectors(examples: int = 50_000) -> Dataset:
    """Return noise: examples of 784 features."""
    return _noise("vectors", (_FEATURES,), examples)


def vectors_of_many() -> Dataset:
    """Return noise: ten examples of 784 features for each of 10,000 clients."""
    return vectors(100_000)


def pictures() -> Dataset:
    """Return noise: pictures of one channel."""
    return _noise("pictures", (1, _PIXELS, _PIXELS), 10_000)


def _noise(name: str, shape: tuple[int, ...], examples: int) -> Dataset:
    random, tests = np.random.default_rng(0), 200
    x = random.standard_normal((examples + tests, *shape), dtype=np.float32)
    y = random.integers(_CLASSES, size=examples + tests)
    return Dataset(
        name, x[:-tests], y[:-tests], x[-tests:], y[-tests:], classes=_CLASSES, input_shape=shape
    )


def _cpu() -> float:
    """Return the CPU seconds of this process and of its living descendants."""
    found: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = int(state[1]), float(state[11]) + float(state[12])
    mine = {os.getpid()}
    while more := {each for each, (parent, _) in found.items() if parent in mine} - mine:
        mine |= more
    return sum(found[each][1] for each in mine) / os.sysconf("SC_CLK_TCK")


@dataclass
class _Watch(Progress):
    """Records CPU and wall-clock seconds when replies arrive."""

    began: float = field(default_factory=time.perf_counter)
    marks: list[tuple[float, float]] = field(default_factory=list)
    first: float = 0.0

    def reply(self, received: int, expected: int) -> None:
        """Record the time of a client's reply."""
        self.first = self.first or time.perf_counter() - self.began
        # Reading CPU seconds takes time itself, so it is done only at the two replies that are used.
        if len(self.marks) == _WARM - 1 or received == expected:
            self.marks.append((_cpu(), time.perf_counter()))
        else:
            self.marks.append((0.0, 0.0))

    def row(self) -> Row:
        """Return the costs of a client-round, counted from the reply at which everything is loaded."""
        (cpu, wall), (cpu_end, wall_end) = self.marks[_WARM - 1], self.marks[-1]
        counted = len(self.marks) - _WARM
        return {
            "cpu_ms": round(1e3 * (cpu_end - cpu) / counted, 2),
            "wall_ms": round(1e3 * (wall_end - wall) / counted, 2),
            "first_reply_seconds": round(self.first, 2),
            "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        }


def _scenario(task: Task, policy: str) -> Scenario:
    here = __name__
    model = f"{here}:{task.model}" if task.model == "Linear" else task.model
    table = {
            "title": "throughput",
            "seeds": [0],
            "methods": [policy],
            "target": {"method": policy},
            "data": {"dataset": f"{here}:{task.data}", "partition": "iid"},
            "model": {"name": model},
            "training": {
                "rounds": task.rounds, "batch_size": task.batch, "local_steps": task.steps,
                "learning_rate": _RATE, "client_fraction": task.each_round / task.clients,
                "evaluate_every": task.rounds,
            },
            "method": {policy: {"policy": policy}},
            "fleet": [{"device": "laptop", "count": task.clients, "speedup": 2.0}],
    }  # fmt: skip
    return Scenario.from_json(json.dumps(table))


def _of_this_library(task: Task, policy: str) -> Row:
    """Run a scenario on the local engine."""
    watch = _Watch()
    with quiet_log(of=["flwr", "fl_elastic"]), tempfile.TemporaryDirectory() as folder:
        simulate(Simulation(_scenario(task, policy), Path(folder)), watch, engine="local")
    return watch.row()


@dataclass(frozen=True, eq=False)
class _Shared:
    """Data and model for the plain training of any client."""

    task: Task
    dataset: Dataset
    model: nn.Module

    @classmethod
    def of(cls, name: str) -> _Shared:
        """Load data and model of a task."""
        task = TASKS[name]
        dataset: Dataset = globals()[task.data]()
        where = f"{__name__}:" if task.model == "Linear" else ""
        model = build_model(where + task.model, dataset.input_shape, dataset.classes, 0)
        return cls(task, dataset, model.train())

    def train(self, weights: Mapping[str, torch.Tensor], client: int, seed: int) -> nn.Module:
        """Return the model after a client's training steps from these weights."""
        task, model = self.task, self.model
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        mine = slice(client * task.examples, (client + 1) * task.examples)
        x, y = self.dataset.train_x[mine], self.dataset.train_y[mine]
        for inputs, targets in Batches(x, y, task.batch, seed=seed, steps=task.steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return model


@lru_cache(maxsize=1)
def _of_task(name: str) -> _Shared:
    """Return what the clients of a task share, loaded once in this process."""
    return _Shared.of(name)


def _bare(name: str) -> Row:
    """Train clients one after another and average their weights, and do nothing else."""
    watch, shared, random = _Watch(), _of_task(name), np.random.default_rng(0)
    task, weights = shared.task, {k: v.clone() for k, v in shared.model.state_dict().items()}
    for number in range(task.rounds):
        total = {key: torch.zeros_like(value) for key, value in weights.items()}
        for turn, client in enumerate(random.choice(task.clients, task.each_round, replace=False)):
            trained = shared.train(weights, int(client), number).state_dict()
            for key, value in trained.items():
                total[key] += value
            watch.reply(turn + 1, task.each_round)
        weights = {key: value / task.each_round for key, value in total.items()}
    return watch.row()


def trained(name: str, weights: Mapping[str, torch.Tensor], client: int) -> nn.Module:
    """Return the model of a task after a client's training steps from these weights."""
    return _of_task(name).train(weights, client, 0)


def _of_flower(name: str) -> Row:
    """Run the same training on Flower's engine, with Flower's own strategy."""
    task, watch = TASKS[name], _Watch()
    with quiet_log(of=["flwr"]):
        plain_rounds(
            partial(trained, name), _of_task(name).model.state_dict(), clients=task.clients,
            each_round=task.each_round, rounds=task.rounds, on_reply=watch.reply,
        )  # fmt: skip
    return watch.row()


class Throughput(Benchmark):
    """CPU time of a client-round, of everything that runs for it, once all is loaded."""

    name = "throughput"
    takes = ("tasks", "methods")
    fresh_process = True

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return the cases: each way on each task, in several turns."""
        return {
            f"{task} | {way} | {turn}": (task, way)
            for turn in range(_TURNS)
            for task in chosen_tasks(request.tasks, TASKS)
            for way in chosen_tasks(request.methods, _WAYS, what="method")
        }

    def run(self, task: str, way: str) -> Row:
        """Run one federation in this process, with one thread."""
        torch.set_num_threads(1)
        if way == LOOP:
            return _bare(task)
        return _of_flower(task) if way == FLOWER else _of_this_library(TASKS[task], way)

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return medians over the turns, and in brackets their ratios to those of the bare loop."""
        table = {
            name: {way: _text(rows, name, way) for way in (LOOP, FULL, ELASTIC, FLOWER)}
            for name in TASKS
        }
        whole = {
            way: {column: _median(rows, "10,000 registered", way, column) for column in _WHOLE}
            for way in (FULL, FLOWER)
        }
        return {
            "costs": pd.DataFrame(table).T.rename_axis("CPU ms a client-round"),
            "registered": pd.DataFrame(whole).T.map(_number).rename_axis("10,000 registered"),
        }


_WHOLE = ("first_reply_seconds", "wall_ms", "peak_mb")


def _median(rows: Rows, task: str, way: str, column: str) -> float | None:
    found = [row[column] for name, row in rows.items() if name.startswith(f"{task} | {way} | ")]
    return statistics.median(found) if found else None


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.3g}"


def _text(rows: Rows, task: str, way: str) -> str:
    mine, bare = (_median(rows, task, each, "cpu_ms") for each in (way, LOOP))
    times = f" ({mine / bare:.2f})" if mine and bare and way != LOOP else ""
    return _number(mine) + times


BENCHMARK = Throughput()
