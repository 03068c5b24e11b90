"""Solve heads in one pass without a step, at various places of a model, its raw input and random features."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import build_model, resolve_model
from fl_elastic.readout.place import INPUT, MOST_FEATURES
from fl_elastic.readout.readout import Readout
from fl_elastic.training import evaluate
from fl_elastic.training.head_sums import head_sums, put_head
from fl_elastic.training.read_out import readout_of
from fl_elastic.update import Manifest
from fl_elastic.update.closed_form import closed_form_head
from fl_elastic.update.head_sums import HeadSums, encode_head_sums
from fl_elastic_simulations.benchmarks.benchmark import Results, Row, add_missing, chosen_tasks
from fl_elastic_simulations.benchmarks.intervals import interval
from fl_elastic_simulations.benchmarks.one_read import ACTS
from fl_elastic_simulations.benchmarks.peaks import ALLOCATOR
from fl_elastic_simulations.data.datasets import Dataset, data_root_folder, load_dataset

# Imported to register models.
from fl_elastic_simulations.models import small as _small  # noqa: F401
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = [
    "ALLOWED",
    "CHOSEN",
    "SEEDS",
    "TASKS",
    "ReadTask",
    "bench_read",
    "bench_read_peaks",
    "bench_read_sizes",
    "read_cell",
    "read_filled",
    "read_markdown",
    "read_peaks_markdown",
    "read_sizes_markdown",
]

SEEDS = (0, 1, 2)
CHOSEN, LAST = "chosen places", "last layer"
ALLOWED = (128, 256, 512, 1024, MOST_FEATURES)
"""Largest numbers of features that a head may read, in the table of the accuracy with fewer features."""
_SIZES = "at most "
_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
# Larger batches do not fit in the cache.
_BATCH = 32
_MOST_PIXELS = 3072
_PEAK = "peak | "


@dataclass(frozen=True)
class ReadTask:
    """A model, and a dataset that it classifies.

    Attributes
    ----------
    title : str
        Title of the table.
    dataset : str
        Name of a registered dataset.
    model : str
        Name of a registered model.
    pretrained : bool
        Whether the model has ImageNet weights; otherwise its weights are random.
    image_size : int, optional
        Size in pixels that images are scaled to.
    examples, tested : int, optional
        Number of examples of the training set and of the test set; all by default.
    fixed : str
        Place inside the model that is fixed without looking at the data.
    """

    title: str
    dataset: str
    model: str
    pretrained: bool
    image_size: int | None = None
    examples: int | None = None
    tested: int | None = None
    fixed: str = "features.6@grid4"

    def methods(self, shape: tuple[int, ...]) -> dict[str, str]:
        """Return the place that each method reads, by the method's name in the table, for inputs of this shape."""
        whole = int(np.prod(shape)) <= _MOST_PIXELS
        return {
            LAST: "last",
            CHOSEN: "auto",
            f"{self.fixed}, whatever the task": self.fixed,
            "the input itself": f"{INPUT}@flat" if whole else f"{INPUT}@grid32",
            "1,024 random features of the input": f"{INPUT}@random1024",
            "2,048 random features of the input": f"{INPUT}@random2048",
        }

    def seeds(self, method: str, seeds: Iterable[int]) -> list[int]:
        """Return the seeds to run: all if they change examples, their order or random weights, else the lowest."""
        matters = (
            self.examples is not None
            or method == CHOSEN
            or (not self.pretrained and "input" not in method)
        )
        return list(seeds) if matters else [min(seeds)]


TASKS: dict[str, ReadTask] = {
    "signs": ReadTask("Traffic signs at 64 pixels", "gtsrb", "mobilenet_v2", True, 64),
    "objects": ReadTask(
        "CIFAR-10 at 64 pixels, 4,000 images", "cifar10_jpegq75", "mobilenet_v2", True, 64, 4000, 1500
    ),
    "birds": ReadTask("50 bird species at 128 pixels", "cub50", "mobilenet_v2", True),
    "clothes": ReadTask(
        "Fashion-MNIST at 64 pixels, 4,000 images", "fashion_mnist", "mobilenet_v2", True, 64, 4000, 2000
    ),
    "signs-from-scratch": ReadTask(
        "Traffic signs at 32 pixels, untrained ResNet of three blocks", "gtsrb", "resnet8", False,
        fixed="block1@grid4",
    ),
    "objects-from-scratch": ReadTask(
        "CIFAR-10 at 32 pixels, 4,000 images, untrained ResNet of three blocks", "cifar10_jpegq75",
        "resnet8", False, None, 4000, 2000, fixed="block1@grid4",
    ),
    "activities-from-scratch": ReadTask(
        "Activities of 23 people, untrained convolutions", "har", "har_cnn", False, fixed="relu1@grid8",
    ),
}  # fmt: skip
"""Tasks by their name on the command line."""


def bench_read(
    results: Results,
    data_root: str | Path | None = None,
    *,
    tasks: Iterable[str] = (),
    seeds: Iterable[int] = SEEDS,
    workers: int = 1,
    tell: Callable[[str], None] = print,
) -> None:
    """Solve a head by each method on each task, without a training step; finished cells are kept.

    Parameters
    ----------
    results : Results
        Table to fill.
    data_root : path-like, optional
        Folder of the datasets.
    tasks : iterable of str
        Names of the tasks to run; all if empty.
    seeds : iterable of int
        Seeds that choose the examples, their order and random weights. If none of these makes a difference for a
        method, only the lowest seed is run.
    workers : int
        Number of cells that run at the same time, each on one core.
    tell : callable
        Called with a line of text for each finished cell.

    Raises
    ------
    ScenarioError
        If a task is unknown.
    """
    root, seeds = str(data_root_folder(data_root)), tuple(seeds)
    cells = {}
    for name in chosen_tasks(tasks, TASKS):
        task = TASKS[name]
        shape = load_dataset(task.dataset, root, task.image_size).input_shape
        for method, read in task.methods(shape).items():
            for seed in task.seeds(method, seeds):
                cells[f"{name} | {method} | {seed}"] = (task, read, seed, root)
    ordered = dict(sorted(cells.items(), key=lambda each: each[1][2]))
    add_missing(
        results, read_cell, ordered, workers, tell,
        lambda row: f"{row['accuracy']:.4f} in {_seconds(row):.2f} s from {row['places'] or LAST}",
    )  # fmt: skip


def bench_read_sizes(
    results: Results,
    data_root: str | Path | None = None,
    *,
    tasks: Iterable[str] = (),
    seeds: Iterable[int] = SEEDS[:1],
    workers: int = 1,
    tell: Callable[[str], None] = print,
) -> None:
    """Choose places with few and with many features, on pretrained models; finished cells are kept.

    Parameters are those of `bench_read`.
    """
    root = str(data_root_folder(data_root))
    cells = {
        f"{name} | {_SIZES}{most} | {seed}": (TASKS[name], "auto", seed, root, None, most)
        for seed in seeds
        for most in reversed(ALLOWED)
        for name in chosen_tasks(tasks, TASKS)
        if TASKS[name].pretrained
    }
    add_missing(
        results, read_cell, cells, workers, tell,
        lambda row: f"{row['accuracy']:.4f} from {row['features']} features of {row['places'] or LAST}",
    )  # fmt: skip


def bench_read_peaks(results: Results, tell: Callable[[str], None] = print) -> None:
    """Measure reading and training of MobileNetV2 on 128-pixel images in batches of 8, in fresh processes."""
    for name, act in ACTS.items():
        if f"{_PEAK}{name}" not in results.rows:
            ended = subprocess.run(
                [sys.executable, "-m", "fl_elastic_simulations.benchmarks.one_read", act],
                env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if ended.returncode:
                last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
                raise TrainingError(f"the process that measures {name!r} ended with {last!r}")
            results.add(f"{_PEAK}{name}", json.loads(ended.stdout))
            tell(name)


def read_peaks_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of peaks of fresh processes."""
    lines = ["| | peak, MB |", "| --- | --- |"]
    for name in ACTS:
        if f"{_PEAK}{name}" in rows:
            lines.append(f"| {name} | {rows[f'{_PEAK}{name}']['peak_bytes'] / 1e6:.0f} |")
    return "\n".join(lines)


def read_sizes_markdown(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of accuracies by number of features, with the bytes that a client sends."""
    names = [name for name, task in TASKS.items() if task.pretrained]
    heads = " | ".join(TASKS[name].title for name in names)
    lines = [f"| features, at most | {heads} |", "| --- |" + " --- |" * len(names)]
    for most in ALLOWED:
        shown = []
        for name in names:
            begin = f"{name} | {_SIZES}{most} | "
            own = [row for cell, row in rows.items() if cell.startswith(begin)]
            if own:
                accuracy, features, sent = (
                    statistics.fmean(row[key] for row in own)
                    for key in ("accuracy", "features", "sent_bytes")
                )
                shown.append(f"{100 * accuracy:.1f} ({features:,.0f}, {sent / 1e6:.2f} MB)")
            else:
                shown.append("")
        if any(shown):
            lines.append(f"| {most:,} | {' | '.join(shown)} |")
    return lines


def read_cell(
    task: ReadTask,
    read: str,
    seed: int,
    root: str,
    examples: int | None = None,
    most: int = MOST_FEATURES,
) -> Row:
    """Solve one head in this process; return its accuracy, error and size, and the CPU seconds of each part.

    Parameters
    ----------
    task : ReadTask
        Task to solve.
    read : str
        ``auto``, ``last`` or names of places.
    seed : int
        Seed, see `bench_read`.
    root : str
        Folder of the datasets.
    examples : int, optional
        Largest number of training and of test examples; by default the task's.
    most : int
        Largest number of features that may be chosen.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load_dataset(task.dataset, root, task.image_size)
    model = _model(task, data, seed, root)
    colour = task.pretrained
    order = np.random.default_rng(seed).permutation(len(data.train_x))
    order = order[: examples or task.examples]
    loader = _batches(data.train_x[order], data.train_y[order], colour=colour)
    times = [time.process_time()]
    model, choice = readout_of(model, loader, read, most_features=most)
    times.append(time.process_time())
    sums = head_sums(model, loader)
    times.append(time.process_time())
    head = closed_form_head(sums)
    put_head(model, head, sums.weight)
    times.append(time.process_time())
    tested = np.random.default_rng(0).permutation(len(data.test_x))[: examples or task.tested]
    tests = _batches(data.test_x[tested], data.test_y[tested], colour=colour)
    accuracy = evaluate(model, classification_loss, tests).accuracy
    return {
        "places": str(model.reading) if isinstance(model, Readout) else "",
        "accuracy": accuracy,
        "error": head.error,
        "penalty": head.penalty,
        "features": head.weight.shape[1],
        "examples": sums.num_examples,
        "choosing_seconds": times[1] - times[0],
        "pass_seconds": times[2] - times[1],
        "solving_seconds": times[3] - times[2],
        "sums_bytes": _sums_bytes(sums.without_folds(), model),
        "sent_bytes": _sums_bytes(sums, model),
        "single": [] if choice is None else [[e.name, round(e.error, 4)] for e in choice.single[:8]],
    }  # fmt: skip


def _model(task: ReadTask, data: Dataset, seed: int, root: str) -> nn.Module:
    if not task.pretrained:
        return build_model(task.model, data.input_shape, data.classes, seed).eval()
    model = resolve_model(task.model, data.classes)
    load_pretrained(model, Path(root) / _WEIGHTS)
    return model.eval()


def _batches(inputs: Any, targets: Any, *, colour: bool) -> list[Batch]:
    given = torch.from_numpy(inputs)
    if colour and given.shape[1] == 1:
        given = given.expand(-1, 3, -1, -1)
    labels = torch.from_numpy(targets)
    return list(zip(torch.split(given, _BATCH), torch.split(labels, _BATCH), strict=True))


def _sums_bytes(sums: HeadSums, model: nn.Module) -> int:
    return len(encode_head_sums(sums, Manifest.of(model)))


def _seconds(row: Mapping[str, Any]) -> float:
    return float(sum(row[f"{part}_seconds"] for part in ("choosing", "pass", "solving")))


def read_markdown(rows: Mapping[str, Mapping[str, Any]], name: str) -> list[str]:
    """Return the lines of the Markdown table of a task, with the means of each method over the seeds.

    >>> read_markdown({}, "signs")
    ['No cell of this table is measured yet.']
    """
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for cell, row in rows.items():
        task, method = cell.split(" | ")[:2]
        if task == name and not method.startswith(_SIZES):
            by_method.setdefault(method, []).append(row)
    if not by_method:
        return ["No cell of this table is measured yet."]
    heads = (
        "method", "seeds", "accuracy, %", "held-out error", "features", "choosing, s", "pass, s", "solving, s",
        "sums, MB",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for method, own in sorted(by_method.items(), key=lambda each: _order(each[0])):
        accuracies = [row["accuracy"] for row in own]
        half = interval(accuracies)
        mean = {
            part: statistics.fmean(row[part] for row in own)
            for part in (
                "error", "features", "choosing_seconds", "pass_seconds", "solving_seconds", "sums_bytes",
            )
        }  # fmt: skip
        around = "" if half is None else f" ± {100 * half:.1f}"
        lines.append(
            f"| {method} | {len(own)} | {100 * statistics.fmean(accuracies):.1f}{around} | {mean['error']:.3f} | "
            f"{mean['features']:,.0f} | {mean['choosing_seconds']:.1f} | {mean['pass_seconds']:.1f} | "
            f"{mean['solving_seconds']:.1f} | {mean['sums_bytes'] / 1e6:.2f} |"
        )
    chosen = dict.fromkeys(f"`{row['places']}`" for row in by_method.get(CHOSEN, ()))
    return [*lines, "", f"Chosen: {'; '.join(chosen)}."] if chosen else lines


def _order(method: str) -> int:
    """Return the position of a method in the table."""
    shown = [LAST, CHOSEN, ", whatever", "the input itself", "1,024", "2,048"]
    return next(place for place, part in enumerate(shown) if part in method)


def read_filled(text: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Return a document with the table of each task, and that of sizes, inserted between their marks.

    >>> read_filled("<!-- read birds -->\nold\n<!-- end -->", {}).splitlines()[1]
    'No cell of this table is measured yet.'
    """

    def table(found: re.Match[str]) -> str:
        lines = read_sizes_markdown(rows) if found[2] == "sizes" else read_markdown(rows, found[2])
        return "\n".join([found[1], *lines, found[3]])

    marked = rf"(<!-- read (sizes|{'|'.join(TASKS)}) -->)\n.*?(<!-- end -->)"
    return re.sub(marked, table, text, flags=re.DOTALL)
