"""A learner is killed at random moments: the state is always one that was saved, counts add up, it learns on."""

from __future__ import annotations

import os
import random
import select
import signal
import sqlite3
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_streams import blobs, closed, learner_in, net, weights

from fl_elastic.streaming import EverySamples, Guard, StreamLearner

HELD = 8
SAVED, OBSERVED = b"s", b"o"


@dataclass(frozen=True)
class Life:
    """How a learner spends its time until it is killed."""

    batch: int
    settings: dict[str, Any] = field(default_factory=dict)
    late: bool = False


LIVES = {
    "observing": Life(7, {"trigger": EverySamples(10**9)}),
    "training": Life(1, {"trigger": EverySamples(12), "replay": "der_pp"}, late=True),
    "training on batches": Life(7, {"trigger": EverySamples(12), "replay": "der_pp"}),
}


def made(folder: Path, life: Life) -> StreamLearner:
    return learner_in(
        folder, net(2), capacity=2**17, steps=4, guard=Guard(every=4, size=HELD), save_every=5,
        **life.settings,
    )  # fmt: skip


def digest(learner: StreamLearner) -> int:
    """What tells one state from another, bit by bit."""
    facts = repr(learner.progress.to_facts()).encode()
    return zlib.crc32(b"".join(w.tobytes() for w in weights(learner).values()), zlib.crc32(facts))


def live(folder: Path, pipe: int, life: Life) -> None:
    """Observe, and tell of each state just before it is saved, and of each batch after it was taken."""
    learner = made(folder, life)
    plain = learner.save

    def told() -> bool:
        os.write(pipe, struct.pack("<cQ", SAVED, digest(learner)))
        return plain()

    learner.save = told  # type: ignore[method-assign]
    while True:
        begun = learner.progress.observed
        stream = blobs(life.batch, [0, 1, 2], seed=begun)
        later = [life.late and (begun + i) % 3 == 0 for i in range(life.batch)]
        seen = learner.observe_batch(
            [x for x, _ in stream],
            [None if late else y for (_, y), late in zip(stream, later, strict=True)],
            [float(begun + i) for i in range(life.batch)],
        )
        for one, (_, y), late in zip(seen, stream, later, strict=True):
            if late and one.sample_id:
                learner.label(one.sample_id, y)
        os.write(pipe, struct.pack("<cQ", OBSERVED, life.batch))


def killed_after(folder: Path, life: Life, words: int, seconds: float) -> list[tuple[bytes, int]]:
    """What a process told before it was killed, so long after it had said so many words, however slow it was."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            live(folder, writing, life)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        try:
            data = b""
            while len(data) < 9 * words and select.select([pipe], [], [], 60)[0]:
                data += pipe.read(9 * words - len(data)) or b"-" * 9 * words
            time.sleep(seconds)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        data += pipe.readall()
    return list(struct.iter_unpack("<cQ", data[: len(data) // 9 * 9]))


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_killed_at_random_moments(life: Life, kills: int, tmp_path: Path) -> None:
    draw = random.Random(kills)
    states: list[int] = []
    saved = observed = seen_before = held_before = 0
    for number in range(kills):
        told = killed_after(tmp_path, life, draw.randrange(1, 25), draw.uniform(0.0, 0.03))
        assert told and told[0][0] != b"-", f"life {number} ended by itself"
        states += [value for kind, value in told if kind == SAVED]
        saved += len(states)
        observed += sum(value for kind, value in told if kind == OBSERVED)
        learner = made(tmp_path, life)
        # The state is the last that was saved, or the one before it; nothing between.
        assert not states or digest(learner) in states[-2:], f"life {number}"
        states = [digest(learner)] if states else []
        assert all(np.isfinite(w).all() for w in weights(learner).values())
        progress, store = learner.progress, learner.store
        held = len(learner._memory.held_out)
        # What was held out goes to the store when it leaves the window.
        assert progress.labelled <= progress.observed <= store.seen + held
        if not life.late:
            # Every sample that a process told of was offered, and at most one batch more; those that were held out
            # when it was killed come again with the state.
            assert progress.observed <= observed + life.batch * (number + 1)
            grown = store.seen - seen_before
            in_this_life = sum(value for kind, value in told if kind == OBSERVED)
            assert in_this_life - HELD <= grown <= in_this_life + life.batch + held_before
            seen_before, held_before = store.seen, held
        assert store.rejected == {} and progress.rejected == {}
        everything = store.sample(10**6, labelled=False)
        assert len(everything) == len(store) == sum(store.classes.values())
        assert set(everything.y.tolist()) - {-1} <= set(learner.classes)
        assert not list(tmp_path.glob("*.damaged*"))
        assert store.used_bytes <= store.capacity_bytes
        learner.store.close()
        with sqlite3.connect(tmp_path / "samples.db") as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert saved > kills
    learner = made(tmp_path, life)
    assert learner.progress.observed > 4 * kills
    if "replay" in life.settings and kills > 5:
        assert learner.progress.adaptations > 20 and learner.progress.accuracy > 0.8
    closed(learner)
