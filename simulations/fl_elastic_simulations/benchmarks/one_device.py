"""Fine-tune on one device with a head in closed form and kept features: accuracy against all the time it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.groups.forward import channels_last
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.training import ElasticTrainer, TrainerOptions, evaluate
from fl_elastic.training.fine_tune import fine_tune
from fl_elastic.training.head_sums import solve_head
from fl_elastic_simulations.benchmarks.cells import add_missing
from fl_elastic_simulations.benchmarks.federation_summary import interval
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.transfer import Shuffled, cosine_adamw
from fl_elastic_simulations.data.datasets import data_root_folder, load_dataset
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = ["METHODS", "OneDeviceMethod", "bench_one_device", "one_device_markdown"]

_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
_BATCH = 16
# The deepest group of the model.
_EVERYTHING = "features.0.0"
RATES = (1e-3, 3e-4)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class OneDeviceMethod:
    """One way to fine-tune.

    Attributes
    ----------
    name : str
        What the table calls it.
    epochs : int
        Passes over the data, besides those for sums.
    solved : bool
        Whether the head is found in closed form, before and after.
    cut : str
        The module from which on anything is trained, with the features below kept; empty where that is left to
        `fine_tune`.
    policy : str
        Who chooses among that.
    speedup : float or None
        Budget of a step, relative to one that trains everything without a cut.
    """

    name: str
    epochs: int
    solved: bool = True
    cut: str = ""
    policy: str = "full"
    speedup: float | None = None


_IN_TURN = (
    "solved head",
    "solved head, block 14, 1 epoch",
    "solved head, block 14, 2 epochs",
)

METHODS = (
    OneDeviceMethod("full", 6, solved=False),
    OneDeviceMethod("full, 2 epochs", 2, solved=False),
    OneDeviceMethod("solved head", 0),
    OneDeviceMethod("solved head, full, 1 epoch", 1, cut=_EVERYTHING),
    OneDeviceMethod("solved head, full, 2 epochs", 2, cut=_EVERYTHING),
    OneDeviceMethod("solved head, cut by worth, 1 epoch", 1),
    OneDeviceMethod("solved head, cut by worth, 2 epochs", 2),
    OneDeviceMethod("solved head, block 14, 1 epoch", 1, cut="features.14"),
    OneDeviceMethod("solved head, block 14, 2 epochs", 2, cut="features.14"),
    OneDeviceMethod("solved head, block 14, 4 epochs", 4, cut="features.14"),
    OneDeviceMethod("solved head, block 11, 2 epochs", 2, cut="features.11"),
    OneDeviceMethod("solved head, block 11, 4 epochs", 4, cut="features.11"),
    OneDeviceMethod("solved head, last layers that fit at 6, 4 epochs", 4, True, "features.7", "last_k", 6),
    OneDeviceMethod("solved head, elastic at 6, 4 epochs", 4, True, "features.7", "elastic", 6),
)  # fmt: skip


def bench_one_device(
    results: Results,
    data_root: str | Path | None = None,
    *,
    methods: Iterable[str] = (),
    workers: int = 2,
    tell: Callable[[str], None] = print,
) -> None:
    """Fine-tune MobileNetV2 with ImageNet weights on fifty bird species.

    Time is the CPU time of one thread for everything: the estimate of costs, passes for sums, solving, filling the
    store, checks, probes, plans and steps. Every method tries the same learning rates with the first seed, and the
    other seeds take the best of them.
    """
    root = str(data_root_folder(data_root))
    chosen = [each for each in METHODS if not methods or each.name in methods]
    _run(results, root, [(m, rate, SEEDS[0]) for m in chosen for rate in _rates(m)], workers, tell)
    rest = [(m, _best_rate(results, m), seed) for m in chosen for seed in SEEDS[1:]]
    _run(results, root, rest, workers, tell)
    _summarise(results, chosen)
    _time_in_turn(results, root, tell)


def _rates(method: OneDeviceMethod) -> tuple[float, ...]:
    return RATES if method.epochs else RATES[:1]


def one_device_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of `docs/measured.md`."""
    lines = [
        "| method | accuracy, % | against full, points | CPU time | timed in turn |",
        "| --- | --- | --- | --- | --- |",
    ]
    for method in METHODS:
        row = rows.get(f"summary {method.name}")
        if row is None:
            continue
        turn = rows.get(f"in turn {method.name}")
        half = "" if row["interval"] is None else f" ± {100 * row['interval']:.1f}"
        lines.append(
            f"| {method.name} | {100 * row['accuracy']:.1f} | {100 * row['against_full']:+.1f}{half} | "
            f"{row['time']:.2f} | {'' if turn is None else format(turn['time'], '.2f')} |"
        )
    return "\n".join(lines)


def _time_in_turn(results: Results, root: str, tell: Callable[[str], None]) -> None:
    """Time some methods one after the other in this process, between two runs of full training.

    The cells of the table ran at different times, beside whatever else the machine did.
    """
    timed = [each for each in METHODS if each.name in _IN_TURN]
    if all(f"in turn {each.name}" in results.rows for each in timed):
        return
    full = METHODS[0]
    seconds = []
    for method in (full, *timed, full):
        row = one_device_cell(method, _best_rate(results, method), SEEDS[0], root)
        seconds.append(row["seconds"])
        tell(f"in turn {method.name}: {row['seconds']:.1f} s")
    around = (seconds[0] + seconds[-1]) / 2
    for method, taken in zip(timed, seconds[1:-1], strict=True):
        results.add(f"in turn {method.name}", {"seconds": taken, "time": taken / around})


def _run(
    results: Results,
    root: str,
    cells: list[tuple[OneDeviceMethod, float, int]],
    workers: int,
    tell: Callable[[str], None],
) -> None:
    add_missing(
        results, one_device_cell, {_name(*cell): (*cell, root) for cell in cells}, workers, tell,
        lambda row: f"{row['accuracy']:.4f} in {row['seconds']:.1f} s",
    )  # fmt: skip


def _name(method: OneDeviceMethod, rate: float, seed: int) -> str:
    return f"{method.name} | {rate:g} | {seed}"


def _best_rate(results: Results, method: OneDeviceMethod) -> float:
    rates = _rates(method)
    return max(rates, key=lambda rate: results.rows[_name(method, rate, SEEDS[0])]["accuracy"])


def _summarise(results: Results, methods: Iterable[OneDeviceMethod]) -> None:
    """Add a row per method: accuracy, its paired difference to full training, and time relative to it."""

    def cells(method: OneDeviceMethod) -> list[dict[str, Any]]:
        rate = _best_rate(results, method)
        return [results.rows[_name(method, rate, seed)] for seed in SEEDS]

    full = cells(METHODS[0])
    for method in methods:
        mine = cells(method)
        gains = [a["accuracy"] - b["accuracy"] for a, b in zip(mine, full, strict=True)]
        seconds = statistics.median(each["seconds"] for each in mine)
        results.add(
            f"summary {method.name}",
            {
                "accuracy": statistics.fmean(each["accuracy"] for each in mine),
                "against_full": statistics.fmean(gains),
                "interval": interval(gains),
                "rate": _best_rate(results, method),
                "seconds": seconds,
                "time": seconds / statistics.median(each["seconds"] for each in full),
            },
        )


def one_device_cell(
    method: OneDeviceMethod, rate: float, seed: int, root: str, examples: int | None = None
) -> dict[str, Any]:
    """Train one network by one method; return its accuracy and the CPU time of everything that it took."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load_dataset("cub50", root)
    inputs, targets = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    model = resolve_model("mobilenet_v2", data.classes)
    load_pretrained(model, Path(root) / _WEIGHTS)
    loader = Shuffled(inputs[:examples], targets[:examples], _BATCH, seed)
    started = time.thread_time()
    found = _train(model.train(), loader, method, rate, seed)
    seconds = time.thread_time() - started
    test = [
        (
            channels_last(torch.from_numpy(data.test_x[i : i + 100])),
            torch.from_numpy(data.test_y[i : i + 100]),
        )
        for i in range(0, len(data.test_x[:examples]), 100)
    ]
    accuracy = evaluate(model, classification_loss, test).accuracy
    return {
        "method": asdict(method), "rate": rate, "seed": seed, "accuracy": accuracy,
        "seconds": seconds, **found,
    }  # fmt: skip


def _train(
    model: nn.Module, loader: Shuffled, method: OneDeviceMethod, rate: float, seed: int
) -> dict[str, Any]:
    make = cosine_adamw(rate, max(method.epochs, 1) * len(loader))
    options = TrainerOptions(deep_every=0, clock="cpu", seed=seed)
    budget = Budget(speedup=method.speedup)
    if not method.epochs:
        solve_head(model, loader)
        return {"steps": 0}
    if not method.solved:
        trainer = ElasticTrainer(
            model, classification_loss, make,
            budget=budget, policy=method.policy, options=options,
        )  # fmt: skip
        return {"steps": trainer.fit(loader, epochs=method.epochs).steps}
    done = fine_tune(
        model, classification_loss, make, loader,
        epochs=method.epochs, cut=method.cut, budget=budget, policy=method.policy, options=options,
        read="last",
    )  # fmt: skip
    assert done.report is not None
    forward = done.report.forward
    assert forward is not None
    return {
        "steps": done.report.steps,
        "step_seconds": done.report.seconds,
        "cut": done.cut,
        "features_found": forward.found,
        "refused": forward.refused,
    }
