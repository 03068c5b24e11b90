"""Streams of ten devices: five get to see turned pictures, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from fl_elastic.losses import classification_loss
from fl_elastic_simulations.data.datasets import load_dataset

__all__ = [
    "CLIENTS",
    "DRIFTS",
    "LENGTH",
    "PIXELS",
    "Task",
    "adam",
    "copied",
    "task_of",
    "trained_at_home",
]

CLIENTS, LENGTH, PIXELS = 10, 800, 14
DRIFTS = (100, 200, 400, 500, 600)
"""Where each of the first five streams changes; the others never do."""

_BEFORE, _HOME_EPOCHS = 600, 10
_DEGREES, _RATE = 60.0, 3e-3


@dataclass(frozen=True, eq=False)
class Task:
    """Samples at home, and those of each device."""

    home_x: NDArray[np.float32]
    home_y: NDArray[np.int64]
    x: tuple[NDArray[np.float32], ...]
    y: tuple[NDArray[np.int64], ...]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimiser of home, learners and rounds."""
    return torch.optim.Adam(parameters, lr=_RATE)


def _net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def copied(like: nn.Module) -> nn.Sequential:
    """Return another model with the same weights."""
    made = _net()
    made.load_state_dict(like.state_dict())
    return made


@cache
def task_of(seed: int, root: str) -> Task:
    """Return the samples of a seed; no device has another's, nor home's."""
    data = load_dataset("fashion_mnist", root)
    order = np.random.default_rng(seed).permutation(len(data.train_y))
    small = avg_pool2d(torch.from_numpy(data.train_x), 2).numpy()
    home, rest = order[:_BEFORE], order[_BEFORE:]
    x, y = [], []
    for number in range(CLIENTS):
        rows = rest[number * LENGTH : (number + 1) * LENGTH]
        own = small[rows].copy()
        if number < len(DRIFTS):
            own[DRIFTS[number] :] = _turned(own[DRIFTS[number] :])
        x.append(np.ascontiguousarray(own))
        y.append(data.train_y[rows])
    return Task(small[home], data.train_y[home], tuple(x), tuple(y))


def _turned(pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return pictures as a camera sees them that was turned."""
    angle = math.radians(_DEGREES)
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    )
    images = torch.from_numpy(pictures)
    grid = affine_grid(turn.repeat(len(images), 1, 1), list(images.shape), align_corners=False)
    # What comes into view is as dark as the edge of the picture.
    seen: Tensor = grid_sample(images, grid, padding_mode="border", align_corners=False)
    return seen.numpy()


def trained_at_home(task: Task, seed: int) -> nn.Module:
    """Return the model that all devices begin with: it knows upright pictures."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, generator = _net(), np.random.default_rng(seed)
        optimizer = adam(model.parameters())
        for _ in range(_HOME_EPOCHS):
            for rows in np.array_split(generator.permutation(_BEFORE), _BEFORE // 32):
                optimizer.zero_grad()
                outputs = model(torch.from_numpy(task.home_x[rows]))
                loss = classification_loss(outputs, torch.from_numpy(task.home_y[rows]))
                torch.autograd.backward(loss)
                optimizer.step()
    return model
