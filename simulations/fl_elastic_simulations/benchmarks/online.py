"""The stream learner as it is by default beside online learners: prequential accuracy and processor time."""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import DatasetError
from fl_elastic.streaming import (
    ClosedForm,
    EverySamples,
    OnDrift,
    SampleStore,
    StreamLearner,
    StreamOptions,
)
from fl_elastic_simulations.benchmarks.cells import add_missing, chosen_tasks
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.data.datasets import data_root_folder

__all__ = [
    "CHOSEN_ON",
    "DEFAULT",
    "METHODS",
    "REMEMBER",
    "SEEDS",
    "STREAMS",
    "OnlineStream",
    "Rows",
    "bench_online",
    "online_markdown",
    "online_means",
    "run_online",
]

SEEDS = (0, 1, 2)
CHOSEN_ON = tuple((name, 0) for name in ("sea", "led", "digits"))
"""Streams and seeds that the default trigger was chosen on; all others were only looked at afterwards."""
DEFAULT = "StreamLearner, defaults"
REMEMBER = 2000
"""Samples after which one counts 1/e of a new one, in the rows of a head in closed form."""
Rows = tuple[NDArray[np.float32], NDArray[np.int64]]
LENGTH = 4000
# Inputs are scaled by what the first rows were like; a device has nothing else to go by.
_FIRST = 200


@dataclass(frozen=True)
class _Cell:
    accuracy: float
    seconds: float


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # As `fl-elastic stream` has it.
    return torch.optim.Adam(parameters, lr=1e-3)


def _solved(remember: float | None, hidden: int) -> Callable[[Rows, int], dict[str, Any]]:
    """Return a run of the stream learner with a head in closed form, on the rows or on a random hidden layer."""

    def run(rows: Rows, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        width = rows[0].shape[1]
        below = [nn.Linear(width, hidden), nn.ReLU()] if hidden else []
        model = nn.Sequential(*below, nn.Linear(hidden or width, 2))
        return _walked(model, rows, seed, head=ClosedForm(remember))

    return run


def _walked(model: nn.Module, rows: Rows, seed: int, **given: Any) -> dict[str, Any]:
    x, y = rows
    with (
        tempfile.TemporaryDirectory() as folder,
        SampleStore(Path(folder) / "samples.db", 64 * 2**20, seed=seed) as store,
    ):
        began = time.process_time()
        learner = StreamLearner(model, store, state_dir=folder, seed=seed, **given)
        for place in range(len(y)):
            learner.observe(x[place], int(y[place]), float(place))
        learner.close()
        seconds = time.process_time() - began
        progress = learner.progress
    return {
        "accuracy": progress.right / progress.labelled,
        "seconds": seconds,
        "adaptations": progress.adaptations,
        "rolled_back": progress.rolled_back,
        "drifts": progress.drifts,
    }


def _learner(every: int | None = None, steps: int = 0) -> Callable[[Rows, int], dict[str, Any]]:
    """Return a run of the stream learner; with nothing given it is as it is by default."""

    def run(rows: Rows, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(rows[0].shape[1], 64), nn.ReLU(), nn.Linear(64, 2))
        given: dict[str, Any] = {}
        if every is not None:
            given["trigger"] = EverySamples(every) | OnDrift()
            given["options"] = StreamOptions(steps=steps)
        return _walked(model, rows, seed, budget=Budget(), optimizer_fn=_adam, **given)

    return run


def _river(make: Callable[[int], Any]) -> Callable[[Rows, int], dict[str, Any]]:
    """Return a run of one of river's learners."""

    def run(rows: Rows, seed: int) -> dict[str, Any]:
        names = [f"x{column}" for column in range(rows[0].shape[1])]
        samples = [dict(zip(names, each, strict=True)) for each in rows[0].tolist()]
        began, learner, right = time.process_time(), make(seed), 0
        for x, y in zip(samples, rows[1].tolist(), strict=True):
            right += learner.predict_one(x) == y
            learner.learn_one(x, y)
        seconds = time.process_time() - began
        return {"accuracy": right / len(samples), "seconds": seconds}

    return run


def _logistic(seed: int) -> Any:
    del seed
    from river import compose, linear_model, multiclass, preprocessing

    return compose.Pipeline(
        preprocessing.StandardScaler(),
        multiclass.OneVsRestClassifier(linear_model.LogisticRegression()),
    )


def _tree(seed: int) -> Any:
    del seed
    from river import tree

    return tree.HoeffdingTreeClassifier()


def _adaptive_tree(seed: int) -> Any:
    from river import tree

    return tree.HoeffdingAdaptiveTreeClassifier(seed=seed)


def _forest(seed: int) -> Any:
    from river import forest

    return forest.ARFClassifier(seed=seed)


def _no_change(rows: Rows, seed: int) -> dict[str, Any]:
    """Predict the last label once more: what a learner must beat where labels come in runs."""
    del seed
    return {"accuracy": float(np.mean(rows[1][1:] == rows[1][:-1])), "seconds": 0.0}


def run_online(stream: str, method: str, seed: int, data_root: str) -> dict[str, Any]:
    """Run one learner over one stream, with one thread."""
    torch.set_num_threads(1)
    rows = STREAMS[stream].read(Path(data_root), seed)
    found = METHODS[method](rows, seed)
    return {**found, "rows": len(rows[1])}


def bench_online(
    results: Results,
    data_root: str | Path | None = None,
    *,
    streams: Iterable[str] = (),
    seeds: Iterable[int] = SEEDS,
    workers: int = 1,
    tell: Callable[[str], None] = print,
) -> None:
    """Run every learner on every stream with every seed; finished cells are kept.

    Raises
    ------
    ScenarioError
        If a stream is unknown.
    """
    root, wanted = str(data_root_folder(data_root)), list(seeds)
    cells = {
        f"{stream} | {method} | {seed}": (stream, method, seed, root)
        for stream in chosen_tasks(streams, STREAMS)
        for seed in wanted
        for method in METHODS
    }
    add_missing(
        results, run_online, cells, workers, tell,
        lambda row: f"{row['accuracy']:.3f}, {row['seconds']:.1f} s",
    )  # fmt: skip


def online_means(rows: Mapping[str, Mapping[str, Any]], stream: str, method: str) -> _Cell | None:
    """Return mean accuracy and seconds over the seeds that the choice has not seen; None if one is missing."""
    seeds = [seed for seed in SEEDS if (stream, seed) not in CHOSEN_ON]
    found = [rows.get(f"{stream} | {method} | {seed}") for seed in seeds]
    there = [row for row in found if row is not None]
    if len(there) < len(seeds):
        return None
    return _Cell(mean(r["accuracy"] for r in there), mean(r["seconds"] for r in there))


def online_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the held-out streams and seeds: accuracy in %, and seconds in brackets."""
    lines = [f"| | {' | '.join(each.title for each in STREAMS.values())} |"]
    lines.append("| --- |" + " --- |" * len(STREAMS))
    for method in METHODS:
        cells = []
        for stream in STREAMS:
            found = online_means(rows, stream, method)
            text = "-" if found is None else f"{100 * found.accuracy:.1f} ({found.seconds:.1f})"
            cells.append(text)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class OnlineStream:
    """A stream.

    Parameters
    ----------
    title : str
        As it stands in tables.
    read : callable
        ``read(data_root, seed)`` gives samples and labels in their order.
    seeded : bool
        Whether each seed is another stream; if not, it is another learner on the same one.
    """

    title: str
    read: Callable[[Path, int], Rows]
    seeded: bool = True


def _scaled(x: NDArray[Any], y: NDArray[Any]) -> Rows:
    x = np.asarray(x, np.float64)
    spread = x[:_FIRST].std(0)
    x = (x - x[:_FIRST].mean(0)) / np.where(spread > 1e-6, spread, 1.0)
    return np.ascontiguousarray(x, np.float32), np.asarray(y, np.int64)


def _changed(make: Callable[[Any, int], tuple[Any, Any]]) -> Callable[[Path, int], Rows]:
    """Return a stream that is one thing in its first half, and another one after it."""

    def read(root: Path, seed: int) -> Rows:
        del root
        from river.datasets import synth

        rows = [row for half in make(synth, seed) for row in islice(iter(half), LENGTH // 2)]
        return _scaled(
            np.array([list(x.values()) for x, _ in rows], np.float64),
            np.array([int(y) for _, y in rows]),
        )

    return read


def _sea(synth: Any, seed: int) -> tuple[Any, Any]:
    first, second = (synth.SEA(variant=v, noise=0.1, seed=2 * seed + v // 3) for v in (0, 3))
    return first, second


def _agrawal(synth: Any, seed: int) -> tuple[Any, Any]:
    first, second = (
        synth.Agrawal(classification_function=f, seed=2 * seed + f // 3) for f in (0, 3)
    )
    return first, second


def _led(synth: Any, seed: int) -> tuple[Any, Any]:
    settings = {"noise_percentage": 0.1, "irrelevant_features": True}
    return (
        synth.LED(seed=2 * seed, **settings),
        synth.LEDDrift(seed=2 * seed + 1, n_drift_features=5, **settings),
    )


def _digits(root: Path, seed: int) -> Rows:
    """Return the bundled digits in two halves, the second one turned by 90 degrees."""
    del root
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = images.reshape(-1, 8, 8)[order]
    images[len(order) // 2 :] = np.rot90(images[len(order) // 2 :], axes=(1, 2))
    return _scaled(images.reshape(len(order), 64), labels[order])


def _table(name: str, rows: int) -> Callable[[Path, int], Rows]:
    def read(root: Path, seed: int) -> Rows:
        del seed
        path = root / "drift_streams" / f"{name}.csv.gz"
        try:
            with gzip.open(path, "rt") as lines:
                found = np.loadtxt(lines, delimiter=",", skiprows=1, max_rows=rows)
        except (OSError, ValueError, EOFError) as error:
            raise DatasetError(f"{name}: {path} cannot be read: {error}") from None
        return _scaled(found[:, :-1], found[:, -1])

    return read


METHODS: dict[str, Callable[[Rows, int], dict[str, Any]]] = {
    "the last label again": _no_change,
    "logistic regression": _river(_logistic),
    "Hoeffding tree": _river(_tree),
    "Hoeffding adaptive tree": _river(_adaptive_tree),
    "adaptive random forest": _river(_forest),
    "StreamLearner, every 200, 20 steps": _learner(200, 20),
    "StreamLearner, every 50, 20 steps": _learner(50, 20),
    DEFAULT: _learner(),
    "StreamLearner, closed form": _solved(REMEMBER, 0),
    "StreamLearner, closed form on 256 random units": _solved(REMEMBER, 256),
}
"""By name, each a run over the rows of a stream with a seed."""
STREAMS: dict[str, OnlineStream] = {
    "sea": OnlineStream("SEA, an abrupt change", _changed(_sea)),
    "agrawal": OnlineStream("Agrawal, an abrupt change", _changed(_agrawal)),
    "led": OnlineStream("LED, five attributes swapped", _changed(_led)),
    "digits": OnlineStream("Digits, turned by 90 degrees", _digits),
    "electricity": OnlineStream("Electricity prices", _table("elec", 10_000), seeded=False),
    "weather": OnlineStream("Rain tomorrow", _table("weather", 10_000), seeded=False),
}
"""By name."""
