"""Fine-tune on one device with a head in closed form and kept features: accuracy against total CPU time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from fl_elastic.groups.forward import channels_last
from fl_elastic.losses import classification_loss
from fl_elastic.readout.place import joined
from fl_elastic.readout.readout_module import Readout
from fl_elastic.training import Timing, TrainerOptions, evaluate
from fl_elastic_simulations.benchmarks.benchmark import (
    Benchmark,
    Request,
    Row,
    Rows,
    chosen_tasks,
)
from fl_elastic_simulations.benchmarks.intervals import mean_text
from fl_elastic_simulations.benchmarks.one_budget import Method, train
from fl_elastic_simulations.benchmarks.transfer import (
    Shuffled,
    cosine_adamw,
    pretrained_mobilenet,
)
from fl_elastic_simulations.data.datasets import load_dataset

_BATCH = 16
# The deepest group of the model.
_EVERYTHING = "features.0.0"
_RATES = (1e-3, 3e-4)


_TUNED = Method("full", speedup=None, solved=True)

METHODS: dict[str, tuple[int, Method]] = {
    "full": (6, Method("full", speedup=None)),
    "full, 2 epochs": (2, Method("full", speedup=None)),
    "solved head": (0, Method(solved=True)),
    "chosen places": (0, Method(solved=True, read="auto")),
    "chosen places, 640 numbers at most": (0, Method(solved=True, read="auto>640")),
    "chosen places, 1 epoch above a cut": (1, replace(_TUNED, read="auto")),
    "solved head, full, 1 epoch": (1, replace(_TUNED, cut=_EVERYTHING)),
    "solved head, full, 2 epochs": (2, replace(_TUNED, cut=_EVERYTHING)),
    "solved head, cut by worth, 1 epoch": (1, _TUNED),
    "solved head, cut by worth, 2 epochs": (2, _TUNED),
    "solved head, block 14, 1 epoch": (1, replace(_TUNED, cut="features.14")),
    "solved head, block 14, 2 epochs": (2, replace(_TUNED, cut="features.14")),
    "solved head, block 14, 4 epochs": (4, replace(_TUNED, cut="features.14")),
    "solved head, block 11, 2 epochs": (2, replace(_TUNED, cut="features.11")),
    "solved head, block 11, 4 epochs": (4, replace(_TUNED, cut="features.11")),
    "solved head, last layers that fit at 6, 4 epochs": (
        4,
        Method("last_k", 6, solved=True, cut="features.7"),
    ),
    "solved head, elastic at 6, 4 epochs": (4, Method("elastic", 6, solved=True, cut="features.7")),
}
"""Passes over the data for training, and the method, by the name in the table."""

_FULL, _IN_TURN = "full", "in turn"
# Timed once more, in turn with full training.
_TIMED = (
    "solved head",
    *(name for name in METHODS if name.startswith("chosen places")),
    "solved head, block 14, 1 epoch",
    "solved head, block 14, 2 epochs",
)


class OneDevice(Benchmark):
    """Accuracy and CPU time of fine-tuning MobileNetV2 with ImageNet weights to birds on one device.

    Time is the CPU time of one thread for all work: estimate of costs, passes for sums, solving, filling the store,
    checks, probes, plans and steps. Every method tries the same learning rates with the first seed; the other seeds
    use the best rate. Finally one process times some methods one after the other, between two runs of
    full training, because the other cells run beside whatever else the machine does.
    """

    name = "one-device"
    takes = ("methods",)

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return all rates with the first seed, then the other seeds, and the timing in turn at the end."""
        methods = chosen_tasks(request.methods, METHODS, what="method")
        root = request.data_root
        cases: dict[str, tuple[Any, ...]] = {}
        for method in methods:
            for rate in _rates(method):
                cases[_name(method, rate, self.seeds[0])] = (method, rate, self.seeds[0], root)
            best = _best_rate(method, rows, self.seeds[0])
            for seed in self.seeds[1:] if best else ():
                cases[_name(method, best or 0.0, seed)] = (method, best, seed, root)
        rates = {method: _best_rate(method, rows, self.seeds[0]) for method in (_FULL, *_TIMED)}
        if all(rates.values()):
            cases[_IN_TURN] = (rates, root)
        return cases

    def run(self, *case: Any) -> Row:
        """Train one network by one method, or several methods in turn."""
        if isinstance(case[0], str):
            return one_device_cell(*case)
        rates, root = case
        seconds = [
            one_device_cell(method, rates[method], self.seeds[0], root)["seconds"]
            for method in (_FULL, *_TIMED, _FULL)
        ]
        around = (seconds[0] + seconds[-1]) / 2
        return {m: taken / around for m, taken in zip(_TIMED, seconds[1:-1], strict=True)}

    def summary(self, row: Mapping[str, Any]) -> str:
        """Return accuracy and seconds."""
        return f"{row['accuracy']:.4f} in {row['seconds']:.1f} s" if "accuracy" in row else ""

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return one row per method, with means over the seeds and differences to full training."""
        cells = {}
        for method in METHODS:
            best = _best_rate(method, rows, self.seeds[0])
            names = [_name(method, best or 0.0, seed) for seed in self.seeds]
            if all(name in rows for name in names):
                cells[method] = pd.DataFrame([rows[name] for name in names])
        lines = {}
        for method, own in cells.items():
            gains = (own["accuracy"] - cells[_FULL]["accuracy"]).tolist()
            turn = rows.get(_IN_TURN, {}).get(method)
            share = own["seconds"].median() / cells[_FULL]["seconds"].median()
            lines[method] = {
                "accuracy, %": f"{100 * own['accuracy'].mean():.1f}",
                "against full, points": mean_text(gains, sign=True),
                "CPU time": f"{share:.2f}",
                "timed in turn": "" if turn is None else f"{turn:.2f}",
            }
        return {"birds": pd.DataFrame.from_dict(lines, orient="index").rename_axis("method")}


def _rates(method: str) -> tuple[float, ...]:
    return _RATES if METHODS[method][0] else _RATES[:1]


def _best_rate(method: str, rows: Rows, seed: int) -> float | None:
    """Return the rate with the best accuracy with this seed; None if a rate is not measured yet."""
    found = {rate: rows.get(_name(method, rate, seed)) for rate in _rates(method)}
    known = {rate: row["accuracy"] for rate, row in found.items() if row is not None}
    return max(known, key=lambda rate: known[rate]) if len(known) == len(found) else None


def _name(method: str, rate: float, seed: int) -> str:
    return f"birds | {method} | {rate:g} | {seed}"


def one_device_cell(
    method: str, rate: float, seed: int, root: str, examples: int | None = None
) -> Row:
    """Train one network by one method; return its accuracy and the CPU time of all the method's work."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load_dataset("cub50", root)
    inputs = torch.from_numpy(data.train_x[:examples])
    targets = torch.from_numpy(data.train_y[:examples])
    model = pretrained_mobilenet(root, data.classes).train()
    loader = Shuffled(inputs, targets, _BATCH, seed)
    epochs, way = METHODS[method]
    done = train(
        way, model, classification_loss, cosine_adamw(rate, max(epochs, 1) * len(loader)), loader,
        passes=epochs, options=TrainerOptions(full_update_every=0, seed=seed, timing=Timing(clock="cpu")),
    )  # fmt: skip
    model = done.model or model
    tested = np.arange(len(data.test_x))[:examples]
    test = [
        (channels_last(torch.from_numpy(data.test_x[rows])), torch.from_numpy(data.test_y[rows]))
        for rows in np.array_split(tested, max(len(tested) // 100, 1))
    ]
    accuracy = evaluate(model, classification_loss, test).accuracy
    reads = joined(model.places) if isinstance(model, Readout) else ""
    row = {"accuracy": accuracy, "seconds": done.seconds, "steps": done.steps, "reads": reads}
    if done.tuned is None:
        return row
    assert done.tuned.report is not None and done.tuned.report.forward is not None
    return {**row, "cut": done.tuned.cut, "features_found": done.tuned.report.forward.found}


BENCHMARK = OneDevice()
