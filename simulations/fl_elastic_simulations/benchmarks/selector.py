"""Channels chosen by a learned selector, by Fisher potential and by chance: accuracy, and what choosing takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch, tensor_groups
from fl_elastic.groups.forward import channels_last
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.planning import POLICIES
from fl_elastic.planning.importance import CHANNEL_SCORES, IMPORTANCES, Probe
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.macs import backward_macs
from fl_elastic.profiling.modes import with_modes
from fl_elastic.profiling.profile_key import profile_key
from fl_elastic.training import ElasticTrainer, Timing, TrainablePart, TrainerOptions, evaluate
from fl_elastic.training.head_sums import solve_head
from fl_elastic_simulations.benchmarks.cells import add_missing
from fl_elastic_simulations.benchmarks.federation_summary import interval
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.transfer import Shuffled
from fl_elastic_simulations.data.datasets import data_root_folder, load_dataset
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = ["COMPARED", "DATASETS", "TIMED", "bench_selector", "selector_markdown", "selector_row"]

COMPARED = ("head", "tinytrain_random", "tinytrain", "tinytrain_learned")
DATASETS = ("gtsrb", "cub50")
TASKS = 6
_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
_WAYS, _SUPPORT, _TESTED, _PIXELS = 10, 160, 200, 64
_BATCH, _EPOCHS, _RATE = 16, 3, 1e-3
TIMED = (16, 64)


def bench_selector(
    results: Results,
    data_root: str | Path | None = None,
    *,
    tasks: int = TASKS,
    workers: int = 1,
    tell: Callable[[str], None] = print,
) -> None:
    """Adapt MobileNetV2 with ImageNet weights to ten random classes by TinyTrain with three ways to choose.

    Each task has 160 images and a head in closed form; 30 steps of Adam within 15 % of the multiply-adds of a full
    backward pass. The selector has seen neither set. One thread and its CPU time.
    """
    root = str(data_root_folder(data_root))
    wanted = {f"{data} | {n}": (data, n, root) for n in range(tasks) for data in DATASETS}
    add_missing(
        results, selector_row, wanted, workers, tell,
        lambda row: ", ".join(f"{policy} {row[policy]:.3f}" for policy in COMPARED),
    )  # fmt: skip


def selector_row(dataset: str, number: int, root: str) -> dict[str, Any]:
    """Adapt to one task by every policy; return accuracies, multiply-adds and seconds of choosing."""
    torch.set_num_threads(1)
    inputs, classes, test = _task(dataset, number, root)
    model = resolve_model("mobilenet_v2", _WAYS)
    load_pretrained(model, Path(root) / _WEIGHTS)
    solve_head(model, list(zip(torch.split(inputs, 32), torch.split(classes, 32), strict=True)))
    loader = Shuffled(inputs, classes, _BATCH, seed=number)
    batch = next(iter(loader))
    row: dict[str, Any] = {}
    for count in TIMED:
        row |= _choosing_seconds(model.train(), (inputs[:count], classes[:count]))
    for policy in COMPARED:
        own = deepcopy(model).train()
        for module in own.modules():
            if isinstance(module, nn.BatchNorm2d):
                # There are few images: norms keep the statistics of pre-training.
                module.momentum = 0.0
        costs = replace(_costs(root), key=profile_key(own, batch, _adam))
        trainer = ElasticTrainer(
            own, classification_loss, _adam, budget=Budget(), policy=policy, profile=costs,
            options=TrainerOptions(
                full_update_every=0, seed=number, part=TrainablePart(keep_statistics=True),
                timing=Timing(closed_loop=False, clock="cpu"),
            ),
        )  # fmt: skip
        plan = trainer.fit(Shuffled(inputs, classes, _BATCH, seed=number), epochs=_EPOCHS).plan
        row[policy] = evaluate(own, classification_loss, test).accuracy
        full = backward_macs(costs.graph, [each.FULL for each in plan.modes])
        row[f"{policy} macs"] = backward_macs(costs.graph, plan.modes) / full
        row[f"{policy} modes"] = [str(mode) for mode in plan.modes]
    same = zip(row["tinytrain modes"], row["tinytrain_learned modes"], strict=True)
    row["same_modes"] = float(np.mean([a == b for a, b in same if "frozen" not in (a, b)] or [0.0]))
    return {
        name: each
        for name, each in row.items()
        if not name.endswith("modes") or name == "same_modes"
    }


def _choosing_seconds(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the processor seconds that layers' and channels' scores take together on one batch."""
    with untouched(model):
        graph = trace_step(model, classification_loss, batch).graph
    groups = tensor_groups(model, classification_loss, batch)
    probe = Probe(
        model, classification_loss, groups, [batch], torch.optim.SGD, np.random.default_rng(0)
    )
    found = {}
    for score in ("fisher", "learned"):
        # Loaded when first asked for.
        importance, channels = IMPORTANCES.make(score), CHANNEL_SCORES.make(score)
        started = time.process_time()
        importance.score(probe)
        channels.score(probe, graph)
        found[f"{score}_seconds_{len(batch[1])}"] = time.process_time() - started
    return found


def _task(dataset: str, number: int, root: str) -> tuple[Tensor, Tensor, list[Batch]]:
    """Return the images and classes of a task, and its test batches."""
    data = load_dataset(dataset, root)
    generator = np.random.default_rng([number, 11])
    chosen = generator.choice(data.classes, _WAYS, replace=False)

    def part(x: Any, y: Any, count: int) -> tuple[Tensor, Tensor]:
        rows = generator.permutation(np.flatnonzero(np.isin(y, chosen)))[:count]
        number_of = {int(value): place for place, value in enumerate(chosen)}
        images = interpolate(
            torch.from_numpy(x[rows]), (_PIXELS, _PIXELS), mode="bilinear", antialias=True
        )
        return channels_last(images), torch.tensor([number_of[int(value)] for value in y[rows]])

    inputs, classes = part(data.train_x, data.train_y, _SUPPORT)
    test_x, test_y = part(data.test_x, data.test_y, _TESTED)
    test = list(zip(torch.split(test_x, 50), torch.split(test_y, 50), strict=True))
    return inputs, classes, test


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=_RATE)


@cache
def _costs(root: str) -> CostProfile:
    """Return the costs of a step, measured once per process."""
    batch = channels_last(torch.randn(_BATCH, 3, _PIXELS, _PIXELS)), torch.arange(_BATCH) % _WAYS
    model = resolve_model("mobilenet_v2", _WAYS)
    load_pretrained(model, Path(root) / _WEIGHTS)
    profile = profile_model(
        model.train(), classification_loss, batch, optimizer_fn=_adam, clock="cpu"
    )
    modes = [mode for policy in COMPARED for mode in POLICIES.make(policy).needs.modes]
    return with_modes(profile, model, clock_for(torch.device("cpu"), "cpu"), modes)


def selector_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the page: means over tasks, with 95 % intervals of paired differences to Fisher."""
    lines = [
        "| policy | signs, % | against Fisher | birds, % | against Fisher | multiply-adds, % |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for policy in COMPARED:
        cells, most = [], 0.0
        for data in DATASETS:
            own = [row for name, row in rows.items() if name.startswith(f"{data} |")]
            found = 100 * np.array([row[policy] for row in own])
            apart = found - 100 * np.array([row["tinytrain"] for row in own])
            cells.append(f"{found.mean():.1f}")
            paired = f"{apart.mean():+.1f} ± {interval(apart.tolist()) or 0.0:.1f}"
            cells.append("" if policy == "tinytrain" else paired)
            most = max(most, *(row[f"{policy} macs"] for row in own))
        lines.append(f"| {policy} | {' | '.join(cells)} | at most {100 * most:.1f} |")
    return "\n".join(lines)
