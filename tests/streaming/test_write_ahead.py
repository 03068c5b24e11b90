"""What is written down before anybody is told: half lines, lines of another life, disks full for a while."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_streams import blobs, closed, learner_in, run

from fl_elastic.streaming import StreamLearner, Trigger
from fl_elastic.streaming import event_log as event_log_module
from fl_elastic.streaming.event_log import Event, EventLog
from fl_elastic.streaming.sources import SourcePosition

NEVER = Trigger(10**9, None)


def abandoned(learner: StreamLearner) -> None:
    """Leave it as a kill does, but for what the store has not been given yet."""
    learner._memory._pending.clear()
    learner.store.close()


def test_half_a_line_is_cut_off_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    for cut in range(1, 30):
        log = EventLog(path, 2**20)
        log.clear()
        for number in (1, 2, 3):
            assert log.add(Event(number, {"y": [1]}, np.full((1, 3), number, np.float32)))
        log.close()
        os.truncate(path, path.stat().st_size - cut)
        again = EventLog(path, 2**20)
        assert [each.number for each in again.read()] == [1, 2]
        assert again.add(Event(3, {"refused": ["no array"]}))
        assert [each.facts for each in again.read()][-1] == {"refused": ["no array"]}
        again.close()


def test_a_learner_that_nothing_made_sense_to_leaves_nothing(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    for _ in range(5):
        assert learner.observe("nonsense").refused
    assert not (tmp_path / "events.log").exists()
    learner.observe(*blobs(1)[0])
    abandoned(learner)
    again = learner_in(tmp_path)
    assert again.progress.observed == 1 and sum(again.progress.rejected.values()) == 5
    closed(again)


def test_where_a_source_was_left_is_what_was_learned_of_it(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, trigger=NEVER)
    for row, (x, y) in enumerate(blobs(30), start=1):
        learner.observe_batch([x], [y], position=SourcePosition("csv:a", {"row": row}))
        if row == 20:
            learner.save()
    abandoned(learner)
    again = learner_in(tmp_path, trigger=NEVER)
    assert again.positions == {"csv:a": {"row": 30}} and again.progress.observed == 30
    closed(again)


def test_where_state_and_log_are_gone_the_store_knows_what_it_was_given(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, trigger=NEVER)
    for row, (x, y) in enumerate(blobs(30), start=1):
        learner.observe_batch([x], [y], position=SourcePosition("csv:a", {"row": row}))
    learner.save()
    learner.store.close()
    for name in ("learner.state", "events.log"):
        (tmp_path / name).unlink()
    again = learner_in(tmp_path, trigger=NEVER)
    assert again.positions == {"csv:a": {"row": 30}} and again.progress.observed == 0
    assert again.observe(*blobs(1)[0]).sample_id == 31
    closed(again)


def test_events_of_another_state_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learner_in(tmp_path, trigger=NEVER)
    run(learner, blobs(10))
    learner.save()
    old = (tmp_path / "learner.state").read_bytes()
    run(learner, blobs(10))
    learner.save()
    run(learner, blobs(10))
    abandoned(learner)
    (tmp_path / "learner.state").write_bytes(old)
    with caplog.at_level(logging.WARNING):
        again = learner_in(tmp_path, trigger=NEVER)
    assert "do not follow on" in caplog.text and again.progress.observed == 10
    # Nothing that comes now is lost behind them.
    run(again, blobs(7))
    abandoned(again)
    third = learner_in(tmp_path, trigger=NEVER)
    assert third.progress.observed == 17
    closed(third)


def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learner_in(tmp_path, trigger=NEVER)
    run(learner, blobs(10))
    plain, writes = os.write, list[int]()

    def half(file: int, data: bytes) -> int:
        writes.append(len(data))
        return plain(file, data[: len(data) // 2])

    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(event_log_module.os, "write", half)
        full.setattr("fl_elastic.state.archive.write_atomically", no_room)
        seen = run(learner, blobs(5, seed=1))
        assert [each.sample_id for each in seen] == [None] * 5 and writes
        assert all(each.prediction is not None for each in seen)
    assert caplog.text.count("disk may be full") == 1
    # What was told of is known, and nothing else.
    state = learner_state_after_a_kill(tmp_path)
    assert state.progress.observed == 10
    closed_quietly(state)
    # As soon as there is room, everything is saved, and goes on as ever.
    assert run(learner, blobs(1, seed=2))[0].sample_id == 16
    assert run(learner, blobs(1, seed=3))[0].sample_id == 17
    abandoned(learner)
    again = learner_in(tmp_path, trigger=NEVER)
    assert again.progress.observed == 17
    closed(again)


def test_what_a_full_disk_did_not_take_is_taken_when_it_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_in(tmp_path, trigger=NEVER)
    run(learner, blobs(10))
    x, y = blobs(1, seed=1)[0]

    def no_room(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(event_log_module.os, "write", no_room)
        full.setattr("fl_elastic.state.archive.write_atomically", no_room)
        assert learner.observe_batch([x], [y], names=["door-1"])[0].sample_id is None
    seen = learner.observe_batch([x], [y], names=["door-1"])[0]
    assert seen.sample_id is not None and not seen.again
    abandoned(learner)
    again = learner_in(tmp_path, trigger=NEVER)
    (kept,) = again._memory.known([seen.sample_id])
    assert np.array_equal(kept.x, x) and kept.y == y
    assert again.observe_batch([x], [y], names=["door-1"])[0].again
    closed(again)


def learner_state_after_a_kill(folder: Path) -> Any:
    """A learner in a copy of a folder."""
    copy = folder / "copy"
    copy.mkdir()
    for name in ("learner.state", "events.log"):
        if (folder / name).exists():
            (copy / name).write_bytes((folder / name).read_bytes())
    return learner_in(copy, trigger=NEVER)


def closed_quietly(learner: StreamLearner) -> None:
    learner.store.close()
