"""A stream whose head reads inside of a model: its learner goes on where it was, and keeps to its places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.errors import StreamError
from fl_elastic.streaming import ClosedForm, Guard, SampleStore, StreamLearner
from fl_elastic.streaming.stream_options import StreamOptions
from fl_elastic.training.read_out import readout_of

PLACES = "1@grid2+2@grid1"


def reading(places: str = PLACES) -> nn.Module:
    """Return a network that ends inside of another, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(4, 2),
        ).eval()  # fmt: skip
    return readout_of(whole, [(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))], places)[0]


def learner(folder: Path, store: SampleStore, model: nn.Module) -> StreamLearner:
    return StreamLearner(
        model, store, head=ClosedForm(), state_dir=folder,
        detector="none", guard=Guard(every=10, size=5), options=StreamOptions(save_every=37),
    )  # fmt: skip


def images(count: int, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    draw, labels = np.random.default_rng(0), np.arange(count) % 3
    x = noise * draw.normal(size=(count, 1, 8, 8)).astype(np.float32)
    for image, label in zip(x, labels, strict=True):
        image[0, 4 * (label // 2) :, 4 * (label % 2) :] += 1.0
    return x, labels


def test_it_learns_new_classes_and_goes_on_where_it_was(tmp_path: Path) -> None:
    x, labels = images(90)
    with SampleStore(tmp_path / "s.db", 2**20) as store:
        with learner(tmp_path, store, reading()) as first:
            first.observe_batch(x[:60], labels[:60])
            assert first.forget([3]).exact and first.reads == PLACES
            scores = first.model(torch.from_numpy(x))
        assert (scores.argmax(1).numpy() == labels).mean() > 0.9
        with learner(tmp_path, store, reading()) as second:
            assert second.classes == (0, 1, 2)
            assert torch.equal(second.model(torch.from_numpy(x)), scores)
            second.observe_batch(x[60:], labels[60:])
            assert not torch.equal(second.model(torch.from_numpy(x)), scores)
        with pytest.raises(StreamError, match="of another model"):
            learner(tmp_path, store, reading("1@grid4"))
