"""Solve heads in one pass without a step, at various places of a model, its raw input and random features."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import encode_head_sums
from fl_elastic.groups import Batch
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import build_model
from fl_elastic.readout.place import INPUT, MOST_FEATURES
from fl_elastic.readout.readout_module import Readout
from fl_elastic.training import evaluate
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.model_head import put_head
from fl_elastic.training.read_out import readout_of
from fl_elastic.update import Manifest
from fl_elastic_simulations.benchmarks.benchmark import (
    Benchmark,
    Request,
    Row,
    Rows,
    chosen_tasks,
)
from fl_elastic_simulations.benchmarks.federation import cells_of
from fl_elastic_simulations.benchmarks.intervals import mean_text
from fl_elastic_simulations.benchmarks.transfer import pretrained_mobilenet
from fl_elastic_simulations.data.datasets import load_dataset

# Imported to register models.
from fl_elastic_simulations.models import small as _small  # noqa: F401

CHOSEN, LAST = "chosen places", "last layer"
MIRRORED = f"{CHOSEN}, mirrored"
ALLOWED = (128, 256, 512, 1024, MOST_FEATURES)
"""Largest numbers of features that a head may read, in the table of the accuracy with fewer features."""
_SIZES = "at most "
# Larger batches do not fit in the cache.
_BATCH = 32
_MOST_PIXELS = 3072
# Number of axes of an image: channels, height and width.
_IMAGE = 3


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
        mirrored = {MIRRORED: "mirrored:auto"} if len(shape) == _IMAGE else {}
        return {
            LAST: "last",
            CHOSEN: "auto",
            **mirrored,
            f"{self.fixed}, whatever the task": self.fixed,
            "the input itself": f"{INPUT}@flat" if whole else f"{INPUT}@grid32",
            "1,024 random features of the input": f"{INPUT}@random1024",
            "2,048 random features of the input": f"{INPUT}@random2048",
        }

    def seeds(self, method: str, seeds: Iterable[int]) -> list[int]:
        """Return the seeds to run: all if they change examples, their order or random weights, else the lowest."""
        matters = (
            self.examples is not None
            or method in (CHOSEN, MIRRORED)
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


class Read(Benchmark):
    """Accuracy and seconds of heads that are solved without a training step, by the place that they read."""

    name = "read"
    takes = ("tasks", "seeds")
    file = "where_to_read"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return every method of every task, and heads of fewer features on pretrained models, by seed."""
        seeds, root = request.seeds or self.seeds, request.data_root
        cases: dict[str, tuple[Any, ...]] = {}
        for name in chosen_tasks(request.tasks, TASKS):
            task = TASKS[name]
            shape = load_dataset(task.dataset, root, task.image_size).input_shape
            for method, read in task.methods(shape).items():
                for seed in task.seeds(method, seeds):
                    cases[f"{name} | {method} | {seed}"] = (task, read, seed, root)
            for most in reversed(ALLOWED if task.pretrained else ()):
                cases[f"{name} | {_SIZES}{most} | {seeds[0]}"] = (
                    task, f"auto>{most}", seeds[0], root, None,
                )  # fmt: skip
        return dict(sorted(cases.items(), key=lambda each: each[1][2]))

    def run(self, *case: Any) -> Row:
        """Solve one head."""
        return read_cell(*case)

    def summary(self, row: Mapping[str, Any]) -> str:
        """Return accuracy, number of features and places."""
        return f"{row['accuracy']:.4f} from {row['features']} features of {row['places'] or LAST}"

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return a table for each task, and that of fewer features."""
        return {name: _table(rows, name) for name in TASKS} | {"sizes": _sizes(rows)}


def _table(rows: Rows, name: str) -> pd.DataFrame:
    """Return means over the seeds by method; its note names the chosen places."""
    methods = dict.fromkeys(cell.split(" | ")[1] for cell in rows if cell.startswith(f"{name} | "))
    lines, chosen = {}, dict[str, None]()
    for method in sorted((each for each in methods if not each.startswith(_SIZES)), key=_order):
        own = pd.DataFrame(list(cells_of(rows, name, method).values()))
        mean = own.mean(numeric_only=True)
        lines[method] = {
            "seeds": str(len(own)),
            "accuracy, %": mean_text(own["accuracy"].tolist()),
            "held-out error": f"{mean['error']:.3f}",
            "features": f"{mean['features']:,.0f}",
            **{
                f"{part}, s": f"{mean[f'{part}_seconds']:.1f}"
                for part in ("choosing", "pass", "solving")
            },
            "sums, MB": f"{mean['sums_bytes'] / 1e6:.2f}",
        }
        if method == CHOSEN:
            chosen = dict.fromkeys(f"`{each}`" for each in own["places"])
    table = pd.DataFrame.from_dict(lines, orient="index").rename_axis("method")
    table.attrs["notes"] = [f"Chosen: {'; '.join(chosen)}."] if chosen else []
    return table


def _order(method: str) -> int:
    """Return the position of a method in the table."""
    shown = [LAST, CHOSEN, ", whatever", "the input itself", "1,024", "2,048"]
    return next(place for place, part in enumerate(shown) if part in method)


def _sizes(rows: Rows) -> pd.DataFrame:
    """Return accuracies by number of features, with the bytes that a client sends."""
    columns = {
        task.title: {
            f"{most:,}": _size(cells_of(rows, name, f"{_SIZES}{most}")) for most in ALLOWED
        }
        for name, task in TASKS.items()
        if task.pretrained
    }
    table = pd.DataFrame(columns).rename_axis("features, at most")
    return table[(table != "").any(axis=1)]


def _size(own: Mapping[int, Mapping[str, Any]]) -> str:
    if not own:
        return ""
    accuracy, features, sent = (
        statistics.fmean(row[key] for row in own.values())
        for key in ("accuracy", "features", "sent_bytes")
    )
    return f"{100 * accuracy:.1f} ({features:,.0f}, {sent / 1e6:.2f} MB)"


def read_cell(
    task: ReadTask,
    read: str,
    seed: int,
    root: str,
    examples: int | None = None,
) -> Row:
    """Solve one head in this process; return its accuracy, error and size, and the CPU seconds of each part.

    Parameters
    ----------
    task : ReadTask
        Task to solve.
    read : str
        ``auto``, ``auto>512`` for at most 512 features, ``last`` or names of places.
    seed : int
        Seed that chooses the examples, their order and random weights.
    root : str
        Folder of the datasets.
    examples : int, optional
        Largest number of training and of test examples; by default the task's.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load_dataset(task.dataset, root, task.image_size)
    if task.pretrained:
        model = pretrained_mobilenet(root, data.classes)
    else:
        model = build_model(task.model, data.input_shape, data.classes, seed)
    model.eval()
    colour = task.pretrained
    order = np.random.default_rng(seed).permutation(len(data.train_x))
    order = order[: examples or task.examples]
    loader = _batches(data.train_x[order], data.train_y[order], colour=colour)
    times = [time.process_time()]
    model, choice = readout_of(model, loader, read)
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


def _batches(inputs: Any, targets: Any, *, colour: bool) -> list[Batch]:
    given = torch.from_numpy(inputs)
    if colour and given.shape[1] == 1:
        given = given.expand(-1, 3, -1, -1)
    labels = torch.from_numpy(targets)
    return list(zip(torch.split(given, _BATCH), torch.split(labels, _BATCH), strict=True))


def _sums_bytes(sums: HeadSums, model: nn.Module) -> int:
    return len(encode_head_sums(sums, Manifest.of(model)))


BENCHMARK = Read()
