"""Fine-tune a pretrained network in every way there is: accuracy against training time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import channels_last
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.planning.request import sent_bytes
from fl_elastic.training import ElasticTrainer, ForwardOptions, Timing, TrainerOptions, evaluate
from fl_elastic_simulations.benchmarks.cells import add_missing, finished_cells
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.data.datasets import data_root_folder, load_dataset
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = ["METHODS", "Shuffled", "TransferMethod", "bench_transfer", "cosine_adamw"]

_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
_BATCH, _EPOCHS = 16, 6
_HEAD_EPOCHS, _HEAD_RATE = 12, 1e-3
RATES = (1e-3, 3e-4, 1e-4)
SEEDS = (0, 1, 2)
_CACHE = 1 << 30


@dataclass(frozen=True)
class TransferMethod:
    """One way to fine-tune.

    Attributes
    ----------
    name : str
        What the table calls it.
    policy : str
        Registered policy.
    speedup : float or None
        Budget per step.
    forward : {"plain", "inference", "cached"}
        How the frozen prefix runs.
    head_first : bool
        Whether a short training of the head alone, on cached features, comes first; its time counts.
    importance : str
        Score that the policy uses.
    epochs : int
        Passes over the data after the head.
    """

    name: str
    policy: str
    speedup: float | None = None
    forward: str = "plain"
    head_first: bool = False
    importance: str = "elastic"
    epochs: int = _EPOCHS


METHODS = (
    TransferMethod("full", "full"),
    TransferMethod("head", "head"),
    TransferMethod("head, cached", "head", forward="cached"),
    TransferMethod("bias", "bias"),
    TransferMethod("last_k at 2", "last_k", 2),
    TransferMethod("ElasticTrainer-style at 2", "elastic", 2, importance="elastic_same_batch"),
    TransferMethod("elastic at 2", "elastic", 2),
    TransferMethod("elastic at 3", "elastic", 3),
    TransferMethod("elastic, inference prefix, at 3", "elastic", 3, "inference"),
    TransferMethod("elastic, cached prefix, at 3", "elastic", 3, "cached"),
    TransferMethod("elastic, cached prefix, at 6", "elastic", 6, "cached"),
    TransferMethod("head first, full", "full", head_first=True),
    TransferMethod("head first, elastic, cached prefix, at 3", "elastic", 3, "cached", True),
    TransferMethod("head first, elastic, cached prefix, at 4", "elastic", 4, "cached", True),
    TransferMethod("head first, elastic, cached prefix, at 6", "elastic", 6, "cached", True),
    TransferMethod("head first, joint, cached prefix, at 6", "joint", 6, "cached", True),
    TransferMethod("head first, elastic, cached prefix, at 3, 3 epochs", "elastic", 3, "cached", True, epochs=3),
    TransferMethod("head first, elastic, cached prefix, at 3, 2 epochs", "elastic", 3, "cached", True, epochs=2),
    TransferMethod("head first, elastic, cached prefix, at 4, 3 epochs", "elastic", 4, "cached", True, epochs=3),
    TransferMethod("head first, elastic, cached prefix, at 4, 2 epochs", "elastic", 4, "cached", True, epochs=2),
)  # fmt: skip


_TIMED = (
    "elastic, cached prefix, at 3",
    "head first, elastic, cached prefix, at 6",
    "head first, elastic, cached prefix, at 4, 3 epochs",
    "head first, elastic, cached prefix, at 3, 3 epochs",
)


class Shuffled:
    """Batches of a dataset in a new order each time, reproducible from a seed; channels last.

    The last batch is left out if it is not whole.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, batch_size: int, seed: int) -> None:
        self._inputs, self._targets, self._size = inputs, targets, batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self.dataset_size = len(inputs)

    def __len__(self) -> int:
        return len(self._inputs) // self._size

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self._inputs), generator=self._generator)
        for index in range(len(self)):
            rows = order[index * self._size : (index + 1) * self._size]
            yield channels_last(self._inputs[rows]), self._targets[rows]


def cosine_adamw(rate: float, steps: int) -> Callable[[Iterable[nn.Parameter]], torch.optim.AdamW]:
    """Return a maker of AdamW whose rate falls to zero along a cosine within ``steps``."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(parameters, lr=rate)
        taken = 0

        def lower(*_: Any) -> None:
            nonlocal taken
            taken += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * min(taken / steps, 1.0)))

        optimizer.register_step_post_hook(lower)
        return optimizer

    return make


def bench_transfer(
    results: Results,
    data_root: str | Path | None = None,
    *,
    workers: int = 2,
    tell: Callable[[str], None] = print,
) -> None:
    """Fine-tune MobileNetV2 with ImageNet weights on fifty bird species by every method.

    One thread and its CPU time per run. Every method tries the same learning rates with the first seed; the other
    seeds take the best of them. Training time counts steps, probes, planning and filling the cache; measuring the
    cost profile, which a device does once, is given apart.
    """
    root = str(data_root_folder(data_root))
    wanted = [(m, rate, SEEDS[0]) for m in METHODS for rate in RATES]
    _run(results, root, wanted, workers, tell)
    rest = [(m, _best_rate(results, m), seed) for m in METHODS for seed in SEEDS[1:]]
    _run(results, root, rest, workers, tell)
    _summarise(results)
    _time_side_by_side(results, root, tell)


def _run(
    results: Results,
    root: str,
    cells: list[tuple[TransferMethod, float, int]],
    workers: int,
    tell: Callable[[str], None],
) -> None:
    add_missing(
        results, train_cell, {_name(*cell): (*cell, root) for cell in cells}, workers, tell,
        lambda row: f"{row['accuracy']:.4f} in {row['seconds']:.1f} s",
    )  # fmt: skip


def _name(method: TransferMethod, rate: float, seed: int) -> str:
    return f"{method.name} | {rate:g} | {seed}"


def _best_rate(results: Results, method: TransferMethod) -> float:
    return max(RATES, key=lambda rate: results.rows[_name(method, rate, SEEDS[0])]["accuracy"])


def _summarise(results: Results) -> None:
    """Add a row per method: mean accuracy over the seeds, and training time relative to full training's."""
    seconds_of_full = 0.0
    for method in METHODS:
        rate = _best_rate(results, method)
        cells = [results.rows[_name(method, rate, seed)] for seed in SEEDS]
        accuracies = [cell["accuracy"] for cell in cells]
        seconds = statistics.fmean(cell["seconds"] for cell in cells)
        seconds_of_full = seconds_of_full or seconds
        results.add(
            f"summary {method.name}",
            {
                "accuracy": statistics.fmean(accuracies),
                "spread": statistics.stdev(accuracies),
                "rate": rate,
                "seconds": seconds,
                "time": seconds / seconds_of_full,
                "selection_seconds": statistics.fmean(c["selection_seconds"] for c in cells),
                "head_seconds": statistics.fmean(cell.get("head_seconds", 0.0) for cell in cells),
            },
        )


def _time_side_by_side(results: Results, root: str, tell: Callable[[str], None]) -> None:
    """Time full training and the methods near a quarter of it at the same time, a core each.

    The cells of the table ran one after another, while the machine's speed drifted.
    """
    wanted = [method for method in METHODS if method.name in _TIMED]
    chosen = [method for method in wanted if f"paired {method.name}" not in results.rows]
    if not chosen:
        return
    cells = {m.name: (m, _best_rate(results, m), SEEDS[0], root) for m in (METHODS[0], *chosen)}
    rows = dict(finished_cells(train_cell, cells, 2))
    seconds = rows[METHODS[0].name]["seconds"]
    for method in chosen:
        row = {"time": rows[method.name]["seconds"] / seconds, "seconds_of_full": seconds}
        results.add(f"paired {method.name}", row)
        tell(f"{method.name}: {row['time']:.3f} of full training's time")


def train_cell(method: TransferMethod, rate: float, seed: int, root: str) -> dict[str, Any]:
    """Train one network by one method; return its accuracy and what it cost."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load_dataset("cub50", root)
    inputs, targets = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    model = resolve_model("mobilenet_v2", data.classes)
    load_pretrained(model, Path(root) / _WEIGHTS)
    loader = Shuffled(inputs, targets, _BATCH, seed)
    head = TransferMethod("", "head", forward="cached")
    first = 0.0
    if method.head_first:
        first = _fit(model.train(), loader, head, _HEAD_RATE, _HEAD_EPOCHS, seed)["seconds"]
    row = _fit(model.train(), loader, method, rate, method.epochs, seed)
    row["seconds"] += first
    row["head_seconds"] = first
    test = [
        (
            channels_last(torch.from_numpy(data.test_x[i : i + 100])),
            torch.from_numpy(data.test_y[i : i + 100]),
        )
        for i in range(0, len(data.test_x), 100)
    ]
    row["accuracy"] = evaluate(model, classification_loss, test).accuracy
    return {"method": asdict(method), "rate": rate, "seed": seed, **row}


def _fit(
    model: nn.Module, loader: Shuffled, method: TransferMethod, rate: float, epochs: int, seed: int
) -> dict[str, Any]:
    forwards = {
        "plain": None,
        "inference": ForwardOptions(),
        "cached": ForwardOptions(feature_bytes=_CACHE),
    }
    trainer = ElasticTrainer(
        model,
        classification_loss,
        cosine_adamw(rate, epochs * len(loader)),
        budget=Budget(speedup=method.speedup),
        policy=method.policy,
        options=TrainerOptions(
            importance=method.importance,
            forward=forwards[method.forward],
            full_update_every=0,
            seed=seed,
            timing=Timing(clock="cpu"),
        ),
    )
    report = trainer.fit(loader, epochs=epochs)
    forward = report.forward
    return {
        "seconds": report.seconds + report.selection_seconds,
        "selection_seconds": report.selection_seconds,
        "steps": report.steps,
        "requested_steps": report.requested_steps,
        "full_step_seconds": report.full_step_seconds,
        "step_bytes": report.plan.predicted_step_bytes,
        "uplink_bytes": sum(
            sent_bytes(group, mode)
            for group, mode in zip(report.plan.groups, report.plan.modes, strict=True)
        ),
        "plans": [
            {"step": step, "depth": plan.depth, "groups": int(plan.mask.sum())}
            for step, plan in report.plans
        ],
        "feature_bytes": 0 if forward is None else forward.feature_bytes,
        "refused": "" if forward is None else forward.refused,
    }
