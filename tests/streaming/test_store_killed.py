"""A process that adds is killed at random moments: what it was told is kept is there, and counts add up."""

from __future__ import annotations

import os
import random
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from killed_process import reported
from toy_streams import relabelled

from fl_elastic.streaming import SampleStore

KILLS = 15


def add_for_ever(path: Path, pipe: int, policy: str, capacity: int) -> None:
    """Add samples whose numbers say which they are, and report each id once `add` has returned."""
    store = SampleStore(path, capacity, policy=policy)
    number = store.seen
    while True:
        batch = [number + 1 + i for i in range(1 + number % 5)]
        ids = store.add(
            np.stack([np.full(40, i, np.float32) for i in batch]), [i % 3 for i in batch]
        )  # fmt: skip
        number = batch[-1]
        if number % 4 == 0:
            store.delete(ids=[each for each in ids if each is not None and each % 16 == 0])
        if number % 7 == 0:
            relabelled(store, number, 9)
        os.write(pipe, b"".join(each.to_bytes(8, "little") for each in ids if each is not None))


def one_life(path: Path, ids: int, seconds: float, policy: str, capacity: int) -> list[int]:
    """Ids that a process reported before it was killed, a moment after it had reported so many."""
    told = reported(lambda pipe: add_for_ever(path, pipe, policy, capacity), 8, ids, seconds)
    return [int.from_bytes(each, "little") for each in told]


@pytest.mark.parametrize(
    "policy", ["class_balanced", pytest.param("reservoir", marks=pytest.mark.slow)]
)
def test_killed_at_random_moments(policy: str, tmp_path: Path) -> None:
    path, draw = tmp_path / "samples.db", random.Random(policy)
    # Room for all in the first lives, at its bound in the later ones.
    capacity = 2**18
    told: set[int] = set()
    for _ in range(KILLS):
        told |= set(one_life(path, draw.randrange(120), draw.uniform(0, 0.01), policy, capacity))
        store = SampleStore(path, capacity, policy=policy)
        everything = store.sample(10**6, labelled=False)
        # Nothing is torn: each sample's numbers and label are its own.
        assert (everything.x == everything.x[:, :1]).all()
        right = (everything.y == everything.x[:, 0] % 3) | (everything.y == 9)
        assert right.all()
        assert dict(Counter(everything.y.tolist())) == store.classes and len(store) == len(
            everything
        )
        assert store.rejected == {} and not list(tmp_path.glob("*.damaged*"))
        ids = set(everything.ids.tolist())
        if told and max(told) < 550:
            # Everything still fits, even what it died before deleting: whatever was acknowledged is there.
            assert {each for each in told if each % 16} <= ids
        store.close()
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert len(told) > 20 * KILLS
