"""A learner is killed at random moments: the state is always one that was saved, and it learns on."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from toy_streams import blobs, closed, learner_in, net, weights

from fl_elastic.streaming import EverySamples, Guard, StreamLearner

KILLS = 50


def made(folder: Path) -> StreamLearner:
    return learner_in(
        folder, net(2), capacity=2**17, steps=4, trigger=EverySamples(12), replay="der_pp",
        guard=Guard(every=4, size=8), save_every=5,
    )  # fmt: skip


def digest(learner: StreamLearner) -> int:
    """What tells one state from another."""
    facts = repr(learner.progress.to_facts()).encode()
    return zlib.crc32(b"".join(w.tobytes() for w in weights(learner).values()), zlib.crc32(facts))


def learn_for_ever(folder: Path, pipe: int) -> None:
    """Observe, and tell of each state just before it is saved, and of each sample after it was taken."""
    learner = made(folder)
    plain = learner.save

    def told() -> bool:
        os.write(pipe, struct.pack("<cQ", b"s", digest(learner)))
        return plain()

    learner.save = told  # type: ignore[method-assign]
    begun = learner.progress.observed
    while True:
        for x, y in blobs(100, [0, 1, 2], seed=begun):
            begun += 1
            seen = learner.observe(x, y if begun % 3 else None, float(begun))
            if not begun % 3 and seen.sample_id:
                learner.label(seen.sample_id, y)
            os.write(pipe, struct.pack("<cQ", b"o", learner.progress.observed))


def one_life(folder: Path, seconds: float) -> list[tuple[bytes, int]]:
    """What a process told before it was killed, so long after its first word."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            learn_for_ever(folder, writing)
        finally:
            os._exit(1)
    os.close(writing)
    data = os.read(reading, 9)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        data += pipe.read()
    return list(struct.iter_unpack("<cQ", data[: len(data) // 9 * 9]))


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(0)
    states: list[int] = []
    many = 0
    for life in range(KILLS):
        told = one_life(tmp_path, draw.uniform(0.0, 0.4))
        assert told, f"life {life} ended by itself"
        states += [value for kind, value in told if kind == b"s"]
        many += len(states)
        learner = made(tmp_path)
        # The state is the last that was saved, or the one before it; nothing between.
        assert not states or digest(learner) in states[-2:], f"life {life}"
        states = [digest(learner)] if states else []
        assert all(np.isfinite(w).all() for w in weights(learner).values())
        progress, store = learner.progress, learner.store
        assert progress.labelled <= progress.observed and store.seen <= 10**6
        assert store.rejected == {} and progress.rejected == {}
        everything = store.sample(10**6, labelled=False)
        assert len(everything) == len(store) == sum(store.classes.values())
        assert set(everything.y.tolist()) - {-1} <= set(learner.classes)
        assert not list(tmp_path.glob("*.damaged*"))
        learner.store.close()
        with sqlite3.connect(tmp_path / "samples.db") as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert many > 2 * KILLS
    learner = made(tmp_path)
    assert learner.progress.observed > 500 and learner.progress.adaptations > 20
    assert learner.progress.accuracy > 0.8
    closed(learner)
