"""A stream whose head reads inside of a model: its state, forgetting and new classes are as ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fl_elastic.streaming import ClosedForm, SampleStore, StreamLearner
from fl_elastic.training.read_out import readout_of


def reading() -> nn.Module:
    """Return the same network each time, which ends inside of it, at two places side by side."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(4, 2),
        )  # fmt: skip
    batches = [(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))]
    return readout_of(model.eval(), batches, "1@grid2+2@grid1")[0]


def learner(folder: Path, store: SampleStore) -> StreamLearner:
    return StreamLearner(reading(), store, head=ClosedForm(), state_dir=folder)


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    draw, labels = np.random.default_rng(0), np.arange(count) % 3
    x = 0.3 * draw.normal(size=(count, 1, 8, 8)).astype(np.float32)
    for image, label in zip(x, labels, strict=True):
        image[0, 4 * (label // 2) :, 4 * (label % 2) :] += 1.0
    return x, labels


def test_it_learns_new_classes_and_goes_on_where_it_was(tmp_path: Path) -> None:
    x, labels = images(90)
    with SampleStore(tmp_path / "s.db", 2**20) as store:
        with learner(tmp_path, store) as first:
            first.observe_batch(x[:60], labels[:60], np.arange(60))
            assert first.forget([3]).exact
            scores = first.model(torch.from_numpy(x))
        assert (scores.argmax(1).numpy() == labels).mean() > 0.9
        with learner(tmp_path, store) as second:
            assert second.classes == (0, 1, 2)
            assert torch.equal(second.model(torch.from_numpy(x)), scores)
            second.observe_batch(x[60:], labels[60:], np.arange(60, 90))
            assert not torch.equal(second.model(torch.from_numpy(x)), scores)
