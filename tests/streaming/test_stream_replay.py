"""Batches of new and stored samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_elastic.errors import StreamError
from fl_elastic.streaming import SampleStore, replay_loader
from fl_elastic.streaming.growing_head import ClassMap
from fl_elastic.streaming.replay_loader import Pool, ReplayLoader
from fl_elastic.streaming.stream_options import Replay

CLASSES = ClassMap((7, 3, 5))
KINDS = [Replay(), Replay(8, 0.25), Replay(stored_share=0.0), Replay(5, 1.0)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    with SampleStore(tmp_path / "s.db", 2**20) as made:
        yield made


def fill(store: SampleStore, count: int) -> None:
    """Samples whose numbers are negative, and tell their class."""
    for number in range(1, count + 1):
        store.add(np.full(6, -number, np.float32), CLASSES.label(number % 3))


def pool_of(store: SampleStore, new: int) -> Pool:
    x = np.arange(1, new + 1, dtype=np.float32)[:, None].repeat(6, 1)
    y = np.array([CLASSES.label(i % 3) for i in range(1, new + 1)], np.int64)
    return Pool(x, y, store, CLASSES)


def loader_of(pool: Pool, replay: Replay, steps: int = 4, seed: int = 0) -> ReplayLoader:
    return ReplayLoader(pool, replay, steps, (seed,), torch.from_numpy)


@pytest.mark.parametrize("new", [50, 0])
@pytest.mark.parametrize("replay", KINDS)
def test_reading_ahead_changes_no_batch(
    replay: Replay, new: int, store: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 60)
    loader = loader_of(pool_of(store, new), replay, steps=7)
    ahead = list(loader)
    monkeypatch.setattr(replay_loader, "_AHEAD_BYTES", 0)
    for (x, y), (other_x, other_y) in zip(ahead, loader, strict=True):
        assert torch.equal(x, other_x) and torch.equal(y, other_y)


@pytest.mark.parametrize("left", [0, 3])
def test_samples_that_vanish_while_they_are_read_are_made_up_for(
    left: int, store: SampleStore
) -> None:
    fill(store, 60)
    loader = loader_of(pool_of(store, 5), Replay(), steps=6)
    batches = iter(loader)
    next(batches)
    store.delete(ids=range(left + 1, 61))
    rest = list(batches)
    assert len(rest) == 5 and all(len(x) == loader.dataset_size // 6 for x, _ in rest)
    assert {float(x) for x in rest[-1][0][:, 0] if x < 0} <= {-1.0, -2.0, -3.0}


@pytest.mark.parametrize("replay", KINDS)
@pytest.mark.parametrize(("new", "stored"), [(50, 50), (3, 2), (0, 20), (20, 0)])
def test_every_batch_is_whole_and_labels_are_right(
    replay: Replay, new: int, stored: int, store: SampleStore
) -> None:
    fill(store, stored)
    loader = loader_of(pool_of(store, new), replay)
    batches = list(loader)
    assert len(batches) == len(loader) == 4 and loader.dataset_size == 4 * replay.rows
    for inputs, outputs in batches:
        assert inputs.shape == (replay.rows, 6) and outputs.shape == (replay.rows,)
        assert outputs.tolist() == (inputs[:, 0].abs().long() % 3).tolist()


@pytest.mark.parametrize("replay", KINDS)
def test_reading_again_gives_the_same_batches_and_another_seed_others(
    replay: Replay, store: SampleStore
) -> None:
    fill(store, 60)
    pool = pool_of(store, 40)
    loader = loader_of(pool, replay)
    first, second, other = list(loader), list(loader), list(loader_of(pool, replay, seed=1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


def test_shares_of_new_and_stored(store: SampleStore) -> None:
    fill(store, 60)
    replay = Replay(rows=8, stored_share=0.25)
    for inputs, _ in loader_of(pool_of(store, 40), replay):
        assert (inputs[:6, 0] > 0).all() and (inputs[6:, 0] < 0).all()
        # No sample twice while there are enough.
        assert len(set(inputs[:, 0].tolist())) == 8


def test_nothing_to_learn_from_is_said(store: SampleStore) -> None:
    with pytest.raises(StreamError, match="no labelled sample"):
        next(iter(loader_of(pool_of(store, 0), Replay())))


def test_only_samples_of_the_wished_version(store: SampleStore) -> None:
    fill(store, 10)
    store.add(np.full(6, -100, np.float32), CLASSES.label(1), version="new")
    pool = Pool(np.zeros((0, 6), np.float32), np.zeros(0, np.int64), store, CLASSES, "new")
    inputs, _ = next(iter(loader_of(pool, Replay(rows=4))))
    assert (inputs == -100).all()


def test_what_means_nothing_is_refused() -> None:
    for make in (
        lambda: Replay(rows=0),
        lambda: Replay(stored_share=1.5),
    ):
        with pytest.raises(StreamError):
            make()
