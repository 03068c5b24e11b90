"""Compare all methods under one budget: on birds, and on a task of your own."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pydantic
import torch
from torch import nn

from fl_elastic.errors import BudgetError, ModelError, PlanError, ScenarioError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import channels_last
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import build_model, check_model_name
from fl_elastic.profiling import load_profile
from fl_elastic.training import Timing, TrainerOptions, evaluate
from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows, chosen_tasks
from fl_elastic_simulations.benchmarks.federation import Cells, cells_of
from fl_elastic_simulations.benchmarks.intervals import mean_text
from fl_elastic_simulations.benchmarks.one_budget import METHODS, keep_costs, train
from fl_elastic_simulations.benchmarks.transfer import (
    Shuffled,
    cosine_adamw,
    pretrained_mobilenet,
)
from fl_elastic_simulations.data.datasets import Dataset, check_dataset_name, load_dataset

REFERENCE = "last_k"
"""Method that all others are compared with, pair by pair: training the last groups that fit."""
# The learning rate that suits a head of zeros damages the layers below a solved head.
_SOLVED_RATE = 3e-4
_NO_TOKENS = "tokens are left out of transformers, and this is a convolutional network"


@dataclass(frozen=True)
class ComparedTask:
    """A task on which all methods are compared.

    Attributes
    ----------
    title : str
        Title of the task in documents.
    model : callable
        ``model(data, seed, data root)`` returns the initial network.
    dataset : str
        Dataset that the network is fine-tuned on.
    left_out : mapping of str to str
        Methods that are known not to suit the task, each with the reason.
    image_size : int, optional
        Size in pixels that images are scaled to.
    batch_size : int
        Number of examples in a step.
    passes, rate, head_rate : int, float, float
        Passes and learning rate of full training, and the learning rate for training only a head.
    """

    title: str
    model: Callable[[Dataset, int, str], nn.Module]
    dataset: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    image_size: int | None = None
    batch_size: int = 16
    passes: int = 6
    rate: float = 3e-4
    head_rate: float = 1e-3

    @property
    def methods(self) -> list[str]:
        """Names of the methods that suit the task, in the order of the table."""
        return [name for name in METHODS if name not in self.left_out]


def _mobilenet(data: Dataset, seed: int, root: str) -> nn.Module:
    del seed
    return pretrained_mobilenet(root, data.classes)


TASKS: dict[str, ComparedTask] = {
    "birds": ComparedTask(
        "MobileNetV2 to 50 bird species",
        _mobilenet,
        "cub50",
        {"bsr": _NO_TOKENS, "e_vit": _NO_TOKENS},
    ),
}
"""Tasks by their name on the command line."""


class _Own(pydantic.BaseModel, extra="forbid", allow_inf_nan=False):
    """Settings of a user's own task."""

    model: str
    dataset: str
    image_size: pydantic.PositiveInt | None = None
    batch_size: pydantic.PositiveInt = 16
    passes: pydantic.PositiveInt = 6
    rate: pydantic.PositiveFloat = 1e-3
    head_rate: pydantic.PositiveFloat = 1e-2


def _built(name: str, data: Dataset, seed: int, root: str) -> nn.Module:
    del root
    return build_model(name, data.input_shape, data.classes, seed)


def own_task(settings: Mapping[str, Any]) -> ComparedTask:
    """Return the task of a user's own model and dataset; methods that do not suit it are found by trying.

    Parameters
    ----------
    settings : mapping
        ``model`` and ``dataset``, named as in a scenario; a function of your own returns the model with its initial
        weights. ``image_size``, ``batch_size``, ``passes``, ``rate`` and ``head_rate`` are those of `ComparedTask`.

    Raises
    ------
    ScenarioError
        If a setting is missing, unknown or impossible.
    ModelError, RegistryError
        If a name is unknown.
    """
    try:
        own = _Own(**settings)
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ScenarioError(f"a task of your own: {'; '.join(problems)}") from None
    check_model_name(own.model)
    check_dataset_name(own.dataset)
    pixels = "" if own.image_size is None else f" at {own.image_size} pixels"
    # The title holds the settings, so that each combination of settings has its own cells and costs.
    title = (
        f"{own.model} on {own.dataset}{pixels}, {own.passes} passes in batches of {own.batch_size}, "
        f"rates {own.rate:g} and {own.head_rate:g}"
    )
    return ComparedTask(
        title, partial(_built, own.model), own.dataset, image_size=own.image_size,
        batch_size=own.batch_size, passes=own.passes, rate=own.rate, head_rate=own.head_rate,
    )  # fmt: skip


class SideBySide(Benchmark):
    """Accuracy, CPU time and bytes of every method at half the cost of full training, from the same weights.

    The costs of a step, which all methods share, are measured once and stored beside the table. For your own task
    give ``--set model=...`` and ``--set dataset=...``, names or ``module:callable``. Optional settings are
    image_size, batch_size, passes, rate and head_rate. Give it a file of its own by ``--output``.
    """

    name = "side-by-side"
    takes = ("tasks", "methods", "seeds", "settings")
    seeds = (0,)

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return every method that suits a task with every seed, which sets batches and choices."""
        tasks = self.tasks(request)
        wanted = chosen_tasks(request.methods, METHODS, what="method")
        costs = {name: _costs_file(request.folder, name) for name in tasks}
        for name, task in tasks.items():
            if not costs[name].exists():
                _keep_costs(task, costs[name], request.data_root)
        return {
            f"{name} | {method} | {seed}": (task, method, seed, request.data_root, costs[name])
            for seed in request.seeds or self.seeds
            for name, task in tasks.items()
            for method in task.methods
            if method in wanted
        }

    def tasks(self, request: Request) -> dict[str, ComparedTask]:
        """Return the requested tasks by name."""
        if request.settings:
            if request.folder.name == "side_by_side":
                raise ScenarioError("give your own task a table of its own: --output my-task.json")
            own = own_task(request.settings)
            return {own.title: own}
        return {name: TASKS[name] for name in chosen_tasks(request.tasks, TASKS)}

    def run(self, *case: Any) -> Row:
        """Train by one method; return its row, or the reason for which the method does not suit the task."""
        try:
            return side_by_side_cell(*case)
        except (BudgetError, ModelError, PlanError, TrainingError) as error:
            return {"refused": str(error)}

    def summary(self, row: Mapping[str, Any]) -> str:
        """Return accuracy and seconds, or the reason for which the method does not suit the task."""
        return str(row.get("refused") or f"{row['accuracy']:.4f} in {row['seconds']:.1f} s")

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return a table for each task, with the means of each method over the seeds.

        Differences to training the last groups that fit are paired by seeds, and have 95 % intervals.
        Below the table stand the methods that do not suit the task, with the reasons.
        """
        own = dict.fromkeys(name.split(" | ")[0] for name in rows if " | " in name)
        return {name: _table(rows, name) for name in dict.fromkeys([*TASKS, *own])}


def _table(rows: Rows, name: str) -> pd.DataFrame:
    left_out, lines = dict(TASKS[name].left_out if name in TASKS else {}), {}
    reference = _accuracies(cells_of(rows, name, REFERENCE))
    for method in METHODS:
        own = cells_of(rows, name, method)
        refused = [row["refused"] for row in own.values() if "refused" in row]
        if refused:
            left_out[method] = refused[0]
        elif own:
            found = _accuracies(own)
            pairs = [found[each] - reference[each] for each in found if each in reference]
            more = "" if method == REFERENCE or not pairs else mean_text(pairs, sign=True)
            lines[method] = {
                "seeds": str(len(found)),
                "accuracy, %": f"{100 * statistics.fmean(found.values()):.1f}",
                f"against {REFERENCE}": more,
                "s": f"{statistics.fmean(row['seconds'] for row in own.values()):.2f}",
                "step, MB": _megabytes(own, "step_bytes"),
                "sent, MB": _megabytes(own, "uplink_bytes"),
            }
    table = pd.DataFrame.from_dict(lines, orient="index").rename_axis("method")
    by_reason: dict[str, list[str]] = {}
    for method, reason in left_out.items():
        by_reason.setdefault(reason, []).append(f"`{method}`")
    table.attrs["notes"] = [
        f"Not here: {', '.join(methods)}: {reason}." for reason, methods in by_reason.items()
    ]
    return table


def _accuracies(cells: Cells) -> dict[int, float]:
    return {seed: cell["accuracy"] for seed, cell in sorted(cells.items()) if "accuracy" in cell}


def _megabytes(cells: Cells, kind: str) -> str:
    found = [cell[kind] for cell in cells.values()]
    return "" if None in found else f"{statistics.fmean(found) / 1e6:.1f}"


def side_by_side_cell(
    task: ComparedTask, name: str, seed: int, root: str, costs: Path, examples: int | None = None
) -> Row:
    """Train by one method in this process; return accuracy, CPU seconds and bytes.

    Parameters
    ----------
    task : ComparedTask
        Task to train on.
    name : str
        Name of the method.
    seed : int
        Seed, see `SideBySide.cases`.
    root : str
        Folder of the datasets.
    costs : Path
        File of the costs of a step of the task.
    examples : int, optional
        Largest number of examples.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, method = load_dataset(task.dataset, root, task.image_size), METHODS[name]
    model = task.model(data, seed, root).train()
    loader = _loader(task, data, seed, examples)
    passes = method.passes(task.passes)
    rate = task.rate
    if method.head:
        rate = task.head_rate
    elif method.solved:
        rate = min(rate, _SOLVED_RATE)
    done = train(
        method, model, classification_loss, cosine_adamw(rate, passes * len(loader)), loader,
        passes=passes, options=TrainerOptions(full_update_every=0, seed=seed, timing=Timing(clock="cpu")),
        profile=load_profile(costs),
    )  # fmt: skip
    with done.on_its_tokens(model):
        tests = _tests(data, examples)
        accuracy = evaluate(done.model or model, classification_loss, tests).accuracy
    return {"accuracy": accuracy, **done.row()}


def _keep_costs(task: ComparedTask, path: Path, root: str) -> None:
    data = load_dataset(task.dataset, root, task.image_size)
    loader = _loader(task, data, 0)
    if not len(loader):
        raise ScenarioError(
            f"{task.dataset} has {len(data.train_x)} training examples: give a batch size of at most as many"
        )
    keep_costs(
        path, task.model(data, 0, root).train(), classification_loss,
        cosine_adamw(task.rate, 1), next(iter(loader)), [METHODS[each] for each in task.methods],
    )  # fmt: skip


def _loader(task: ComparedTask, data: Dataset, seed: int, examples: int | None = None) -> Shuffled:
    # Shuffled, since datasets are sorted by class.
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0))[:examples]
    inputs, targets = (
        torch.from_numpy(each[order.numpy()]) for each in (data.train_x, data.train_y)
    )
    return Shuffled(inputs, targets, task.batch_size, seed)


def _tests(data: Dataset, examples: int | None) -> list[Batch]:
    inputs = torch.from_numpy(data.test_x[:examples])
    targets = torch.from_numpy(data.test_y[:examples])
    return [
        (channels_last(x), y)
        for x, y in zip(torch.split(inputs, 100), torch.split(targets, 100), strict=True)
    ]


def _costs_file(folder: Path, task: str) -> Path:
    """Return the file of the costs of a task, in the folder of its table."""
    return folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', task)}-costs.state"


BENCHMARK = SideBySide()
