"""How a device fared around the drift of its stream, from whether each prediction was right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from fl_elastic.losses import classification_loss
from fl_elastic_simulations.benchmarks.stream_metrics import drift_delays, prequential_accuracy
from fl_elastic_simulations.data.datasets import load_dataset

__all__ = [
    "CLIENTS",
    "DRIFTS",
    "LENGTH",
    "PIXELS",
    "ClientScore",
    "Task",
    "adam",
    "client_score",
    "combined",
    "copied",
    "task_of",
    "trained_at_home",
]

_AFTER, _LEAST, _SHARE, _LEVEL = 200, 20, 0.95, 0.7
_EARLY = 2
CLIENTS, LENGTH, PIXELS = 10, 800, 14
DRIFTS = (100, 200, 400, 500, 600)
"""Where each of the first five streams changes; the others never do."""
_BEFORE, _HOME_EPOCHS = 600, 10
_DEGREES, _RATE = 60.0, 3e-3


@dataclass(frozen=True)
class ClientScore:
    """How one device fared.

    Parameters
    ----------
    drift : int or None
        Where its stream changed; None for never.
    recovery : float
        Samples until its accuracy was back; those until the end of the stream if it never was; NaN without a drift.
    recovered : bool
        Whether it was back.
    level : float
        Samples until it was right in 70 % of all cases, whatever it was before; counted as the recovery.
    before, after : float
        Share of right predictions in the 200 samples before and after the drift.
    late : float
        The same, from the first drift of any device to the end.
    delay : float
        Samples until the drift was noticed; NaN if it was not.
    """

    drift: int | None
    recovery: float
    recovered: bool
    level: float
    before: float
    after: float
    late: float
    delay: float


def client_score(
    hits: Sequence[bool], drift: int | None, first: int, alarms: Sequence[int], fading: float
) -> ClientScore:
    """Return how a device fared.

    Parameters
    ----------
    hits : sequence of bool
        Whether each prediction was right.
    drift : int or None
        Where its stream changes.
    first : int
        Where the first of all streams changes.
    alarms : sequence of int
        Where it noticed a drift.
    fading : float
        Of the prequential accuracy, by which it is back.

    Examples
    --------
    >>> hits = [True] * 50 + [False] * 10 + [True] * 200
    >>> found = client_score(hits, 50, 50, [62], fading=0.9)
    >>> found.recovery, found.recovered, round(found.after, 2), found.delay
    (34.0, True, 0.95, 12.0)
    """
    right = np.asarray(hits, float)
    late = float(right[first:].mean())
    if drift is None:
        return ClientScore(None, math.nan, False, math.nan, math.nan, math.nan, late, math.nan)
    before = float(right[max(drift - _AFTER, 0) : drift].mean())
    # The accuracy in the changed world alone: what came before it would hide the fall.
    since = prequential_accuracy(hits[drift:], fading)
    back, good = (np.flatnonzero(since[_LEAST:] >= aim) for aim in (_SHARE * before, _LEVEL))
    return ClientScore(
        drift=drift,
        recovery=float(_LEAST + back[0] if len(back) else len(since)),
        recovered=bool(len(back)),
        level=float(_LEAST + good[0] if len(good) else len(since)),
        before=before,
        after=float(right[drift : drift + _AFTER].mean()),
        late=late,
        delay=drift_delays(alarms, [drift], len(hits))[0],
    )


def combined(scores: Sequence[ClientScore]) -> dict[str, Any]:
    """Return means over the devices that were hit, over those but the first two, and over the others."""
    hit = sorted((each for each in scores if each.drift is not None), key=lambda s: s.drift or 0)
    spared = [each for each in scores if each.drift is None]
    noticed = [each.delay for each in hit if not math.isnan(each.delay)]
    return {
        "recovery": statistics.fmean(each.recovery for each in hit),
        "late_recovery": statistics.fmean(each.recovery for each in hit[_EARLY:]),
        "to_level": statistics.fmean(each.level for each in hit),
        "late_to_level": statistics.fmean(each.level for each in hit[_EARLY:]),
        "late_after_drift": statistics.fmean(each.after for each in hit[_EARLY:]),
        "recovered": sum(each.recovered for each in hit) / len(hit),
        "before_drift": statistics.fmean(each.before for each in hit),
        "after_drift": statistics.fmean(each.after for each in hit),
        "not_hit": statistics.fmean(each.late for each in spared),
        "not_hit_each": [each.late for each in spared],
        "to_level_each": [each.level for each in hit],
        "recovery_each": [each.recovery for each in hit],
        "after_drift_each": [each.after for each in hit],
        "noticed": len(noticed),
        "delay": statistics.fmean(noticed) if noticed else None,
    }


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
