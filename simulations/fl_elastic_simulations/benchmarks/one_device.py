"""Fine-tune on one device with a head in closed form and kept features: accuracy against all the time it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.groups.forward import channels_last
from fl_elastic.losses import classification_loss
from fl_elastic.named_models import resolve_model
from fl_elastic.readout.place import joined
from fl_elastic.readout.readout import Readout
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions, evaluate
from fl_elastic.training.fine_tune import fine_tune
from fl_elastic.training.read_out import read_out
from fl_elastic_simulations.benchmarks.cells import add_missing, chosen_tasks
from fl_elastic_simulations.benchmarks.federation_summary import interval
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.transfer import Shuffled, cosine_adamw
from fl_elastic_simulations.data.datasets import data_root_folder, load_dataset
from fl_elastic_simulations.models.pretrained import load_pretrained

__all__ = [
    "ELSEWHERE",
    "METHODS",
    "OneDeviceMethod",
    "OneDeviceTask",
    "bench_one_device",
    "elsewhere_markdown",
    "one_device_markdown",
]

_WEIGHTS = "weights/mobilenet_v2_imagenet_onnx7_backbone.npz"
_BATCH = 16
# The deepest group of the model.
_EVERYTHING = "features.0.0"
RATES = (1e-3, 3e-4)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class OneDeviceTask:
    """What is learned.

    Attributes
    ----------
    title : str
        What the table calls it.
    dataset : str
        Registered name.
    image_size : int, optional
        To which images are scaled.
    examples, tested : int, optional
        Of the training and the test set; all if left out.
    """

    title: str
    dataset: str
    image_size: int | None = None
    examples: int | None = None
    tested: int | None = None


_BIRDS = OneDeviceTask("50 bird species", "cub50")
ELSEWHERE = {
    "signs": OneDeviceTask("traffic signs at 64 pixels", "gtsrb", 64),
    "objects": OneDeviceTask(
        "CIFAR-10 at 64 pixels, 4,000 images", "cifar10_jpegq75", 64, 4000, 1500
    ),
}
"""Tasks besides the birds, by the name that their rows begin with; few methods are run there."""


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
    read : str
        Where the solved head reads, as `fine_tune` has it.
    """

    name: str
    epochs: int
    solved: bool = True
    cut: str = ""
    policy: str = "full"
    speedup: float | None = None
    read: str = "last"


_CHOSEN = ("chosen places", "chosen places, 1 epoch above a cut")
_ELSEWHERE = ("full", "solved head", *_CHOSEN)
_SEEDS_ELSEWHERE = SEEDS[:2]
_IN_TURN = (
    "solved head",
    "solved head, block 14, 1 epoch",
    "solved head, block 14, 2 epochs",
    *_CHOSEN,
)

METHODS = (
    OneDeviceMethod("full", 6, solved=False),
    OneDeviceMethod("full, 2 epochs", 2, solved=False),
    OneDeviceMethod("solved head", 0),
    OneDeviceMethod("chosen places", 0, read="auto"),
    OneDeviceMethod("chosen places, 1 epoch above a cut", 1, read="auto"),
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
    tasks: Iterable[str] = (),
    workers: int = 2,
    tell: Callable[[str], None] = print,
) -> None:
    """Fine-tune MobileNetV2 with ImageNet weights on fifty bird species, and by few methods on other images.

    Time is the CPU time of one thread for everything: the estimate of costs, passes for sums, solving, filling the
    store, checks, probes, plans and steps. Every method tries the same learning rates with the first seed, and the
    other seeds take the best of them. Other images than birds have two seeds and the smaller rate.
    """
    root = str(data_root_folder(data_root))
    chosen = [each for each in METHODS if not methods or each.name in methods]
    named = chosen_tasks(tasks, ("birds", *ELSEWHERE))
    elsewhere = {name: task for name, task in ELSEWHERE.items() if name in named}
    add_missing(
        results, one_device_cell,
        {
            f"{name}: {_name(each, RATES[-1], seed)}": (each, RATES[-1], seed, root, None, task)
            for seed in _SEEDS_ELSEWHERE
            for name, task in elsewhere.items()
            for each in chosen
            if each.name in _ELSEWHERE
        },
        workers, tell, _said,
    )  # fmt: skip
    if "birds" not in named:
        return
    _run(results, root, [(m, rate, SEEDS[0]) for m in chosen for rate in _rates(m)], workers, tell)
    rest = [(m, _best_rate(results, m), seed) for m in chosen for seed in SEEDS[1:]]
    _run(results, root, rest, workers, tell)
    _summarise(results, chosen)
    _time_in_turn(results, root, chosen, tell)


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


def elsewhere_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the tasks besides the birds: means over seeds, and time over that of full training."""
    lines = [
        "| task | method | seeds | accuracy, % | against full, points | CPU time | reads |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, task in ELSEWHERE.items():

        def found(method: OneDeviceMethod, name: str = name) -> dict[int, Mapping[str, Any]]:
            names = {seed: f"{name}: {_name(method, RATES[-1], seed)}" for seed in SEEDS}
            return {seed: rows[each] for seed, each in names.items() if each in rows}

        full = found(METHODS[0])
        for method in METHODS:
            own = found(method)
            pairs = [(own[seed], full[seed]) for seed in own if seed in full]
            if not pairs:
                continue
            accuracy = statistics.fmean(mine["accuracy"] for mine, _ in pairs)
            gain = statistics.fmean(mine["accuracy"] - other["accuracy"] for mine, other in pairs)
            time = statistics.fmean(mine["seconds"] / other["seconds"] for mine, other in pairs)
            reads = dict.fromkeys(mine.get("reads") or "last layer" for mine, _ in pairs)
            lines.append(
                f"| {task.title} | {method.name} | {len(pairs)} | {100 * accuracy:.1f} | {100 * gain:+.1f} | "
                f"{time:.3f} | {'; '.join(reads)} |"
            )
    return "\n".join(lines)


def _time_in_turn(
    results: Results, root: str, methods: Iterable[OneDeviceMethod], tell: Callable[[str], None]
) -> None:
    """Time some methods one after the other in this process, between two runs of full training.

    The cells of the table ran at different times, beside whatever else the machine did.
    """
    timed = [
        each
        for each in methods
        if each.name in _IN_TURN and f"in turn {each.name}" not in results.rows
    ]
    if not timed:
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
        _said,
    )  # fmt: skip


def _said(row: Mapping[str, Any]) -> str:
    return f"{row['accuracy']:.4f} in {row['seconds']:.1f} s"


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
    method: OneDeviceMethod,
    rate: float,
    seed: int,
    root: str,
    examples: int | None = None,
    task: OneDeviceTask = _BIRDS,
) -> dict[str, Any]:
    """Train one network by one method; return its accuracy and the CPU time of everything that it took."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load_dataset(task.dataset, root, task.image_size)
    # Which examples of a bounded set there are is no matter of the seed: pairs are of the same ones.
    chosen = np.random.default_rng(0).permutation(len(data.train_x))[: task.examples]
    chosen = np.sort(chosen)[:examples]
    inputs, targets = torch.from_numpy(data.train_x[chosen]), torch.from_numpy(data.train_y[chosen])
    model = resolve_model("mobilenet_v2", data.classes)
    load_pretrained(model, Path(root) / _WEIGHTS)
    loader = Shuffled(inputs, targets, _BATCH, seed)
    started = time.process_time()
    model, found = _train(model.train(), loader, method, rate, seed)
    seconds = time.process_time() - started
    tested = np.random.default_rng(0).permutation(len(data.test_x))[: task.tested]
    tested = np.sort(tested)[:examples]
    test = [
        (
            channels_last(torch.from_numpy(data.test_x[rows])),
            torch.from_numpy(data.test_y[rows]),
        )
        for rows in np.array_split(tested, max(len(tested) // 100, 1))
    ]
    accuracy = evaluate(model, classification_loss, test).accuracy
    return {
        "method": asdict(method), "rate": rate, "seed": seed, "accuracy": accuracy,
        "seconds": seconds, **found,
    }  # fmt: skip


def _train(
    model: nn.Module, loader: Shuffled, method: OneDeviceMethod, rate: float, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    make = cosine_adamw(rate, max(method.epochs, 1) * len(loader))
    options = TrainerOptions(full_update_every=0, seed=seed, timing=Timing(clock="cpu"))
    budget = Budget(speedup=method.speedup)
    if not method.epochs:
        model = read_out(model, loader, read=method.read).model
        return model, {"steps": 0, "reads": _reads(model)}
    if not method.solved:
        trainer = ElasticTrainer(
            model, classification_loss, make,
            budget=budget, policy=method.policy, options=options,
        )  # fmt: skip
        return model, {"steps": trainer.fit(loader, epochs=method.epochs).steps}
    done = fine_tune(
        model, classification_loss, make, loader,
        epochs=method.epochs, cut=method.cut, budget=budget, policy=method.policy, options=options,
        read=method.read,
    )  # fmt: skip
    assert done.report is not None
    forward = done.report.forward
    assert forward is not None
    return done.model, {
        "steps": done.report.steps,
        "step_seconds": done.report.seconds,
        "cut": done.cut,
        "features_found": forward.found,
        "refused": forward.refused,
        "reads": done.reads,
    }


def _reads(model: nn.Module) -> str:
    return joined(model.places) if isinstance(model, Readout) else ""
