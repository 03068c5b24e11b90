"""All methods at one budget: transfer to birds, few shots of signs, a vision transformer, anybody's own task."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_elastic.errors import BudgetError, ModelError, PlanError, ScenarioError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import channels_last
from fl_elastic.losses import classification_loss
from fl_elastic.profiling import load_profile
from fl_elastic.training import Timing, TrainerOptions, evaluate
from fl_elastic_simulations.benchmarks.cells import Row, add_missing, chosen_tasks
from fl_elastic_simulations.benchmarks.federation_summary import cells_of, interval
from fl_elastic_simulations.benchmarks.few_shots import (
    EPISODES,
    few_shots_row,
    keep_few_shots_costs,
)
from fl_elastic_simulations.benchmarks.one_budget import METHODS, Method, keep_costs, train
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.side_by_side_tasks import TASKS, ComparedTask, vit_file
from fl_elastic_simulations.benchmarks.transfer import Shuffled, cosine_adamw
from fl_elastic_simulations.data.datasets import Dataset, data_root_folder, load_dataset
from fl_elastic_simulations.models.class_token_vit import HEAD, class_token_vit
from fl_elastic_simulations.models.pretraining import Recipe, of_images, pretraining

__all__ = [
    "BASE",
    "RECIPE",
    "REFERENCE",
    "SEEDS",
    "bench_side_by_side",
    "costs_file",
    "side_by_side_cell",
    "side_by_side_filled",
    "side_by_side_markdown",
]

BASE = "base"
"""Row of the transformer before it is fine-tuned."""
REFERENCE = "last_k"
"""With which all others are compared, pair by pair: the last groups that fit."""
SEEDS = (0,)
RECIPE = Recipe(steps=1400, batch_size=32, learning_rate=1.5e-3)
# What suits a head of zeros tears the layers below one that is solved for.
_SOLVED_RATE = 3e-4
_PRETRAINED_ON = "cifar10_jpegq75"


def bench_side_by_side(
    results: Results,
    data_root: str | Path | None = None,
    *,
    tasks: Iterable[str] = (),
    methods: Iterable[str] = (),
    seeds: Iterable[int] = SEEDS,
    workers: int = 1,
    tell: Callable[[str], None] = print,
    among: Mapping[str, ComparedTask] = TASKS,
) -> None:
    """Train by every method within half of the price of full training, from the same weights.

    What is the same for all methods is made once and stays beside the table: the costs of a step, and the weights
    of the transformer, which learns CIFAR-10 for two minutes. Several processes may fill one table.

    Parameters
    ----------
    results : Results
        The table; finished cells are kept.
    data_root : path-like, optional
        Where the datasets are.
    tasks, methods : iterable of str
        Names of those to run; all if none is given.
    seeds : iterable of int
        Of batches and choices, and of heads; of few shots, which forty episodes.
    workers : int
        Cells at a time, each on one core.
    tell : callable
        Hears of each finished cell.
    among : mapping of str to ComparedTask
        The tasks that there are.

    Raises
    ------
    ScenarioError
        If a task or method is unknown.
    """
    root, folder = str(data_root_folder(data_root)), results.path.parent / results.path.stem
    names = chosen_tasks(tasks, among)
    wanted = chosen_tasks(methods, METHODS, what="method")
    if TASKS["vit"] in (among[name] for name in names) and not (
        BASE in results.rows and vit_file(folder).exists()
    ):
        lessons = of_images(class_token_vit, _PRETRAINED_ON, root, left=HEAD)
        results.add(BASE, pretraining(RECIPE, lessons, vit_file(folder)))
    costs = {name: costs_file(folder, name) for name in names}
    for name in names:
        _keep_costs(among[name], costs[name], root)
    cells = {
        f"{name} | {method} | {seed}": (among[name], method, seed, root, str(costs[name]))
        for seed in seeds
        for name in names
        for method in among[name].methods
        if method in wanted
    }

    def said(row: Row) -> str:
        return str(row.get("refused") or f"{row['accuracy']:.4f} in {row['seconds']:.1f} s")

    add_missing(results, side_by_side_cell, cells, workers, tell, said)


def side_by_side_cell(
    task: ComparedTask, method: str, seed: int, root: str, costs: str, examples: int | None = None
) -> dict[str, Any]:
    """Train by one method in this process; return accuracy, processor seconds and bytes, or why it is refused.

    Parameters
    ----------
    task : ComparedTask
        On which.
    method : str
        Its name.
    seed : int
        See `bench_side_by_side`.
    root, costs : str
        Where the datasets are, and the costs of the task; weights are beside these.
    examples : int, optional
        Bound of examples, or episodes.
    """
    torch.set_num_threads(1)
    try:
        if task.model is None:
            return few_shots_row(METHODS[method], seed, root, Path(costs), examples or EPISODES)
        return _transferred(task, METHODS[method], seed, root, Path(costs), examples)
    except (BudgetError, ModelError, PlanError, TrainingError) as error:
        return {"refused": str(error)}


def _transferred(
    task: ComparedTask, method: Method, seed: int, root: str, costs: Path, examples: int | None
) -> dict[str, Any]:
    torch.manual_seed(seed)
    data = load_dataset(task.dataset, root, task.image_size)
    assert task.model is not None
    model = task.model(data, seed, root, costs.parent).train()
    loader = _loader(task, data, examples or task.examples, seed)
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
        tests = _tests(task, data, examples or task.tested)
        accuracy = evaluate(done.model or model, classification_loss, tests).accuracy
    return {"accuracy": accuracy, **done.row()}


def _keep_costs(task: ComparedTask, path: Path, root: str) -> None:
    if path.exists():
        return
    if task.model is None:
        keep_few_shots_costs(path, root)
        return
    data = load_dataset(task.dataset, root, task.image_size)
    loader = _loader(task, data, task.examples, 0)
    if not len(loader):
        raise ScenarioError(
            f"{task.dataset} has {len(data.train_x)} training examples: give a batch size of at most as many"
        )
    keep_costs(
        path, task.model(data, 0, root, path.parent).train(), classification_loss,
        cosine_adamw(task.rate, 1), next(iter(loader)), [METHODS[each] for each in task.methods],
    )  # fmt: skip


def _loader(task: ComparedTask, data: Dataset, examples: int | None, seed: int) -> Shuffled:
    # In any order: sets are sorted by class.
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0))[:examples]
    inputs, targets = _inputs(task, data.train_x), torch.from_numpy(data.train_y)
    return Shuffled(inputs[order], targets[order], task.batch_size, seed)


def _tests(task: ComparedTask, data: Dataset, examples: int | None) -> list[Batch]:
    inputs = _inputs(task, data.test_x[:examples])
    targets = torch.from_numpy(data.test_y[:examples])
    return [
        (channels_last(x), y)
        for x, y in zip(torch.split(inputs, 100), torch.split(targets, 100), strict=True)
    ]


def _inputs(task: ComparedTask, examples: Any) -> Tensor:
    found = torch.from_numpy(examples)
    return found.expand(-1, 3, -1, -1) if task.in_colour else found


def costs_file(folder: Path, task: str) -> Path:
    """Return where the costs of a task are kept: beside its table, whatever it is called."""
    return folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', task)}-costs.json"


def side_by_side_markdown(
    rows: Mapping[str, Mapping[str, Any]], name: str, task: ComparedTask | None = None
) -> list[str]:
    """Return the lines of a Markdown table of a task, by its name: means over the seeds of each method.

    Differences to the last groups that fit are paired, by seeds or by episodes, with 95 % intervals by Student's t.
    Below the table stands what does not fit the task, and why.

    >>> side_by_side_markdown({}, "birds")
    ['No cell of this table is measured yet.']
    """
    task, cells = task or TASKS[name], cells_of(rows, name)
    refused = {
        method: each["refused"]
        for method, own in cells.items()
        for each in own.values()
        if "refused" in each
    }
    cells = {method: own for method, own in cells.items() if method not in refused}
    reference = _accuracies(cells.get(REFERENCE, {}))
    lines = []
    for method in METHODS:
        own = cells.get(method)
        if not own:
            continue
        found = _accuracies(own)
        pairs = [found[each] - reference[each] for each in found if each in reference]
        more = "" if method == REFERENCE or not pairs else _signed(pairs)
        columns = [
            f"{100 * statistics.fmean(found.values()):.1f}", more,
            f"{statistics.fmean(cell['seconds'] for cell in own.values()):.2f}",
            *(_megabytes(own, kind) for kind in ("step_bytes", "uplink_bytes")),
        ]  # fmt: skip
        lines.append(f"| {method} | {len(found)} | {' | '.join(columns)} |")
    if not lines and not refused:
        return ["No cell of this table is measured yet."]
    pairs_of = "episodes" if task.model is None else "seeds"
    return [
        f"| method | {pairs_of} | accuracy, % | against {REFERENCE} | s | step, MB | sent, MB |",
        "| --- |" + " --- |" * 6,
        *lines,
        "",
        *_left_out({**task.left_out, **refused}),
    ]


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each reason for which methods do not fit a task."""
    by_reason: dict[str, list[str]] = {}
    for method, reason in reasons.items():
        by_reason.setdefault(reason, []).append(f"`{method}`")
    return [f"Not here: {', '.join(methods)}: {reason}." for reason, methods in by_reason.items()]


def _accuracies(cells: Mapping[int, Mapping[str, Any]]) -> dict[tuple[int, int], float]:
    """Return accuracies by seed and episode."""
    return {
        (seed, number): accuracy
        for seed, cell in sorted(cells.items())
        for number, accuracy in enumerate(cell.get("accuracies", [cell["accuracy"]]))
    }


def _signed(pairs: list[float]) -> str:
    half = interval(pairs)
    return f"{100 * statistics.fmean(pairs):+.1f}" + (
        "" if half is None else f" ± {100 * half:.1f}"
    )


def _megabytes(cells: Mapping[int, Mapping[str, Any]], kind: str) -> str:
    found = [cell[kind] for cell in cells.values()]
    return "" if None in found else f"{statistics.fmean(found) / 1e6:.1f}"


def side_by_side_filled(text: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Return a document with the table of each task between its marks.

    >>> side_by_side_filled("<!-- side-by-side vit -->\nold\n<!-- end -->", {}).splitlines()[1]
    'No cell of this table is measured yet.'
    """

    def table(found: re.Match[str]) -> str:
        return "\n".join([found[1], *side_by_side_markdown(rows, found[2]), found[3]])

    marked = rf"(<!-- side-by-side ({'|'.join(TASKS)}) -->)\n.*?(<!-- end -->)"
    return re.sub(marked, table, text, flags=re.DOTALL)
