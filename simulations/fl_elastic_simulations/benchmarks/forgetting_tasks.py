"""What is to be forgotten: data, model, and which of the examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.named_models import build_model
from fl_elastic_simulations.data.datasets import load_dataset

__all__ = ["ALPHA", "BATCH", "FORGET_TASKS", "ForgetTask", "Split", "fresh_model", "split_of"]

ALPHA = 3.0
"""How many times as much a weight must matter to what is dampened."""
BATCH = 64
"""Examples of a training step."""
# Of the passes that training took.
_SHORT = 0.2


@dataclass(frozen=True)
class ForgetTask:
    """Data and model, how long it is trained, and what is to be forgotten.

    Parameters
    ----------
    epochs : int
        Passes over the data; of a federation twice as many, two in each round.
    share : float
        Of the training examples that are to be forgotten; 0 for all of one class, the first of which the seed says.
    clients : int
        Of a federation, the first of which alone has what is to be forgotten; 0 for one device that has everything.
    """

    title: str
    dataset: str
    model: str
    epochs: int
    train_limit: int
    test_limit: int
    learning_rate: float = 1e-3
    share: float = 0.0
    clients: int = 0

    @property
    def short(self) -> int:
        """Passes, or rounds, of the ways that train on for a while."""
        return max(round(_SHORT * self.epochs), 1)


_ALONE = {
    "digits, a class": ForgetTask("Digits, one class", "digits", "digits_cnn", 20, 1300, 450),
    "digits, examples": ForgetTask(
        "Digits, a twentieth of the examples", "digits", "digits_cnn", 20, 1300, 450, share=0.05
    ),
    "cifar, a class": ForgetTask(
        "CIFAR-10, one class", "cifar10_jpegq75", "small_cnn", 8, 6000, 2000
    ),
    "cifar, examples": ForgetTask(
        "CIFAR-10, a twentieth", "cifar10_jpegq75", "small_cnn", 8, 6000, 2000, share=0.05
    ),
    "signs, a class": ForgetTask("Traffic signs, one class", "gtsrb", "small_cnn", 6, 6000, 2000),
    "signs, examples": ForgetTask(
        "Traffic signs, a twentieth", "gtsrb", "small_cnn", 6, 6000, 2000, share=0.05
    ),
}  # fmt: skip
FORGET_TASKS = _ALONE | {
    f"{name}, federated": replace(task, title=f"{task.title}, federated", clients=5)
    for name, task in _ALONE.items()
}
"""By the name on the command line."""


@dataclass(frozen=True, eq=False)
class Split:
    """Training examples that stay and those that are to be forgotten; the test alike."""

    kept: tuple[Tensor, Tensor]
    forgotten: tuple[Tensor, Tensor]
    test_kept: tuple[Tensor, Tensor]
    test_forgotten: tuple[Tensor, Tensor]

    @property
    def everything(self) -> tuple[Tensor, Tensor]:
        """All training examples."""
        x, y = (torch.cat(pair) for pair in zip(self.kept, self.forgotten, strict=True))
        return x, y


def split_of(task: ForgetTask, data_root: str | Path | None, seed: int) -> Split:
    """Return a task's examples, drawn by the seed."""
    data = load_dataset(task.dataset, data_root)
    draw = np.random.default_rng(seed)
    train = draw.permutation(len(data.train_y))[: task.train_limit]
    test = draw.permutation(len(data.test_y))[: task.test_limit]
    y, test_y = data.train_y[train], data.test_y[test]
    if task.share:
        gone = draw.random(len(train)) < task.share
        test_gone = np.zeros(len(test), bool)
    else:
        # A class that is there often enough to be tested.
        known = np.bincount(test_y, minlength=data.classes)
        label = draw.choice(np.flatnonzero(known >= max(10, np.median(known))))
        gone, test_gone = y == label, test_y == label

    def part(x: Any, labels: Any, rows: Any) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(x[rows]), torch.from_numpy(labels[rows])

    return Split(
        part(data.train_x, data.train_y, train[~gone]),
        part(data.train_x, data.train_y, train[gone]),
        part(data.test_x, data.test_y, test[~test_gone]),
        part(data.test_x, data.test_y, test[test_gone]),
    )


def fresh_model(task: ForgetTask, split: Split, seed: int) -> nn.Module:
    """Return the task's model as it starts."""
    classes = int(max(split.everything[1].max(), split.test_kept[1].max())) + 1
    return build_model(task.model, tuple(split.kept[0].shape[1:]), classes, seed)
