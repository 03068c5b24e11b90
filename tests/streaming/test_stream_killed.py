"""A learner is killed at random moments: it goes on with all that it told of, and counts nothing twice."""

from __future__ import annotations

import os
import random
import sqlite3
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_process import reported
from toy_streams import blobs, closed, in_memory, learner_in, net, weights

from fl_elastic.state.codec import to_archive
from fl_elastic.streaming import ClosedForm, Guard, StreamLearner, Trigger
from fl_elastic.streaming.solved_head import SolvedHead

HELD = 8
WORD = struct.Struct("<QQQ")


@dataclass(frozen=True)
class Life:
    """How a learner spends its time until it is killed."""

    batch: int
    settings: dict[str, Any] = field(default_factory=dict)
    late: bool = False


LIVES = {
    "observing": Life(7, {"trigger": Trigger(10**9, None)}),
    "training": Life(1, {"trigger": Trigger(12, None)}, late=True),
    "training on batches": Life(7, {"trigger": Trigger(12, None)}),
    "solving on batches": Life(7, {"head": ClosedForm()}),
    "solving": Life(1, {"head": ClosedForm(remember=50)}, late=True),
    "solving late labels of batches": Life(7, {"head": ClosedForm()}, late=True),
}


def made(folder: Path, life: Life) -> StreamLearner:
    learner = learner_in(
        folder, net(2), capacity=2**17, steps=4, guard=Guard(every=4, size=HELD), save_every=50,
        **life.settings,
    )  # fmt: skip
    learner.tick()
    return learner


def digest(learner: StreamLearner) -> int:
    """What tells one state from another, bit by bit."""
    facts = repr(learner.progress).encode()
    parts = [*weights(learner).values(), *in_memory(learner).values()]
    if isinstance(learner.rule, SolvedHead):
        parts += [*to_archive(learner.rule.sums.to_state()).arrays.values()]
    return zlib.crc32(b"".join(each.tobytes() for each in parts), zlib.crc32(facts))


def live(folder: Path, pipe: int, life: Life) -> None:
    """Observe, and tell after each batch how much was counted and what the learner is like."""
    learner = made(folder, life)
    while True:
        begun = learner.progress.observed
        stream = blobs(life.batch, [0, 1, 2], seed=begun)
        later = [life.late and (begun + i) % 3 == 0 for i in range(life.batch)]
        seen = learner.observe_batch(
            [x for x, _ in stream],
            [None if late else y for (_, y), late in zip(stream, later, strict=True)],
        )
        for one, (_, y), late in zip(seen, stream, later, strict=True):
            if late and one.sample_id:
                learner.label(one.sample_id, y)
        progress = learner.progress
        os.write(pipe, WORD.pack(progress.observed, progress.labelled, digest(learner)))


def killed_after(
    folder: Path, life: Life, words: int, seconds: float
) -> list[tuple[int, int, int]]:
    """What a process told before it was killed, so long after it had said so many words."""
    told = reported(lambda pipe: live(folder, pipe, life), WORD.size, words, seconds)
    return [WORD.unpack(each) for each in told]


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_killed_at_random_moments(life: Life, kills: int, tmp_path: Path) -> None:
    draw = random.Random(kills)
    for number in range(kills):
        told = killed_after(tmp_path, life, draw.randrange(1, 25), draw.uniform(0.0, 0.03))
        observed, labelled, state = told[-1]
        learner = made(tmp_path, life)
        progress, store = learner.progress, learner.store
        # Whatever it told of is there; of what it was in the middle of, all or nothing.
        assert observed <= progress.observed <= observed + life.batch, f"life {number}"
        assert progress.observed % life.batch == 0
        if (progress.observed, progress.labelled) == (observed, labelled):
            assert digest(learner) == state, f"life {number}"
        assert all(np.isfinite(w).all() for w in weights(learner).values())
        held = [row.number for row in learner._memory.held_out]
        if not life.late:
            # Each sample is with the store or held out, and nowhere twice.
            assert store.seen + len(held) == progress.observed == progress.labelled
        rule = learner.rule
        if isinstance(rule, SolvedHead) and not life.settings["head"].remember:
            # Each label is in the sums or held out, and nowhere twice; one that comes late finds its sample only
            # where the store had room for it, and is counted apart if not.
            assert round(rule.sums.weight) + len(held) == progress.labelled - progress.unlearned
            full = life.late and len(store) + len(held) < progress.observed
            assert full or not progress.unlearned
        assert store.rejected == {} and progress.rejected == {} and progress.saves_failed == 0
        everything = store.sample(10**6, labelled=False)
        assert not set(everything.ids.tolist()) & set(held)
        assert len(everything) == len(store) == sum(store.classes.values())
        if not isinstance(rule, SolvedHead):
            for x, place in zip(everything.x[-30:], everything.ids[-30:].tolist(), strict=True):
                begun = (place - 1) // life.batch * life.batch
                its_own, _ = blobs(life.batch, [0, 1, 2], seed=begun)[place - 1 - begun]
                assert np.array_equal(x, its_own)
        assert set(everything.y.tolist()) - {None} <= set(learner.classes)
        assert not list(tmp_path.glob("*.damaged*"))
        assert store.used_bytes <= store.capacity_bytes
        learner.store.close()
        with sqlite3.connect(tmp_path / "samples.db") as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    learner = made(tmp_path, life)
    assert learner.progress.observed > 4 * kills
    if life.settings.get("trigger") == Trigger(12, None) and kills > 5:
        assert learner.progress.adaptations > 20 and learner.progress.accuracy > 0.8
    closed(learner)
