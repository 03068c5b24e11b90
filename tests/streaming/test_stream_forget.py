"""A stream's model forgets samples, and no file of the learner holds them afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import conv_net
from test_stream_latent import pictures
from torch import nn
from toy_streams import CENTRES, adam, blobs, closed, learner_in, net, run, same, weights

from fl_elastic.errors import StoreError, StreamError, UpdateError
from fl_elastic.streaming import Guard, Latent, StreamLearner, Trigger
from fl_elastic.streaming.labelled_weights import LabelledWeights
from fl_elastic.streaming.round_inbox import RoundChange, RoundInbox, change_between

LABELS = range(5)


def taught(folder: Path, count: int = 400, **settings: Any) -> tuple[StreamLearner, list[int]]:
    """A learner that knows five classes, and the ids of the samples of the last one."""
    learner = learner_in(folder, net(5), optimizer_fn=gently, **settings)
    seen = run(learner, blobs(count, LABELS))
    ids = [
        each.sample_id for each, (_, y) in zip(seen, blobs(count, LABELS), strict=True) if y == 4
    ]
    return learner, ids


def gently(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A model that is certain of everything has hardly a gradient to tell by what matters."""
    return torch.optim.Adam(parameters, lr=0.002)


def accuracy(learner: StreamLearner, *labels: int) -> float:
    stream = blobs(200, labels, seed=9)
    with torch.no_grad():
        x = torch.from_numpy(np.stack([each for each, _ in stream]))
        found = learner.model(x).argmax(dim=1).tolist()
    known = [learner.classes[each] for each in found]
    return float(np.mean([said == y for said, (_, y) in zip(known, stream, strict=True)]))


def bytes_of(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file())


def test_a_class_is_forgotten_and_the_others_are_kept(tmp_path: Path) -> None:
    learner, ids = taught(tmp_path)
    assert accuracy(learner, 4) > 0.9
    came = learner.forget(ids, alpha=2.0)
    assert accuracy(learner, 4) < 0.3
    assert accuracy(learner, 0, 1, 2, 3) > 0.85
    assert came.weights > 0 and came.examples == came.deleted == len(ids)
    assert 4 not in {int(y) for y in learner.store.sample(1000).y}
    assert all(row.y != 4 for row in learner._memory.held_out)
    assert came.theirs_before.accuracy > 0.9 and came.theirs_after.accuracy < 0.3
    assert came.theirs_after.samples == len(ids)
    assert came.before.samples == came.after.samples == len(learner._memory.held_out)
    closed(learner)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["raw", "int8"])
def test_its_bytes_are_in_no_file_of_the_learner(tmp_path: Path, encoding: str) -> None:
    learner, ids = taught(tmp_path, encoding=encoding, guard=Guard(every=4))
    learner.observe(CENTRES[4], 4)
    stored = learner.store.take(ids).x if encoding == "raw" else None
    samples = [x for x, y in blobs(400, LABELS) if y == 4]
    wanted = [x.tobytes() for x in samples]
    before = bytes_of(tmp_path)
    assert any(each in before for each in wanted), "nothing could be found in the first place"
    assert stored is None or len(stored)
    learner.forget(ids, alpha=2.0)
    after = bytes_of(tmp_path)
    assert not any(each in after for each in wanted)
    closed(learner)
    after = bytes_of(tmp_path)
    assert not any(each in after for each in wanted)


def test_samples_without_a_label_are_deleted_and_change_no_weight(tmp_path: Path) -> None:
    learner, _ = taught(tmp_path, 100)
    number = learner.observe(CENTRES[0]).sample_id
    before = weights(learner)
    came = learner.forget([number])
    assert (came.examples, came.deleted, came.weights) == (0, 1, 0)
    assert same(weights(learner), before) and not len(learner.store.take([number]))
    assert learner.label(number, 1).refused == "no such sample"
    closed(learner)


def test_they_may_be_told_by_the_names_that_their_sender_gave_them(tmp_path: Path) -> None:
    learner, _ = taught(tmp_path, 100)
    learner.observe_batch([CENTRES[1], CENTRES[2]], [1, 2], names=["one", "two"])
    before = len(learner.store)
    held = {row.number for row in learner._memory.held_out}
    numbers = [learner._stream.number(name) for name in ("one", "two")]
    came = learner.forget(["one", "two", "nobody"])
    assert came.deleted == 2
    assert len(learner.store) == before - len([n for n in numbers if n not in held])
    closed(learner)


def test_features_of_latent_replay_are_forgotten_above_the_frozen_part(tmp_path: Path) -> None:
    learner = learner_in(
        tmp_path, conv_net(), encoding="int8", latent=Latent(2), steps=20, optimizer_fn=adam,
        trigger=Trigger(50, None),
    )  # fmt: skip
    stream = pictures(300)
    ids = [
        seen.sample_id for seen, (_, y) in zip(run(learner, stream), stream, strict=True) if y == 2
    ]
    before = weights(learner)
    came = learner.forget(ids, alpha=1.5)
    after = weights(learner)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    trained = set(learner.adaptations[-1].trained)
    assert came.weights > 0 and changed
    assert all(
        any(f"model.{name}".startswith(f"{group}.") for group in trained) for name in changed
    )
    closed(learner)


@pytest.mark.parametrize(
    ("alpha", "why"),
    [(0.0, "must be above 0"), (50.0, "selects nothing"), (float("nan"), "above 0")],
)
def test_a_number_that_means_nothing_changes_nothing(
    tmp_path: Path, alpha: float, why: str
) -> None:
    learner, ids = taught(tmp_path, 100)
    before, stored = weights(learner), len(learner.store)
    with pytest.raises(UpdateError, match=why):
        learner.forget(ids, alpha=alpha)
    assert same(weights(learner), before) and len(learner.store) == stored
    closed(learner)


def test_all_that_is_known_cannot_be_forgotten(tmp_path: Path) -> None:
    learner, _ = taught(tmp_path, 60)
    everything = range(1, 100)
    with pytest.raises(StreamError, match="start a new learner"):
        learner.forget(everything)
    closed(learner)


@pytest.mark.slow
def test_a_file_that_somebody_reads_is_said_not_to_be_rewritten(tmp_path: Path) -> None:
    learner, ids = taught(tmp_path, 100)
    import sqlite3

    with sqlite3.connect(tmp_path / "samples.db", isolation_level=None) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM samples").fetchone()
        with pytest.raises(StoreError, match="may still hold the bytes"):
            learner.forget(ids, alpha=2.0)
        other.execute("ROLLBACK")
    # It can be done once nobody reads.
    learner.store.erase(ids)
    assert not len(learner.store.take(ids))
    closed(learner)


def test_a_sample_whose_label_was_corrected_to_a_new_class_is_forgotten_as_any_other(
    tmp_path: Path,
) -> None:
    learner, ids = taught(tmp_path, 60)
    again = learner.store.take(ids).ids.tolist()[0]
    learner.label(again, 9)
    assert learner.classes[-1] == 9 and learner.classes[:-1] == tuple(
        sorted(LABELS, key=learner.classes.index)
    )
    assert learner.forget([again]).examples == 1
    assert learner.store.classes.get(9) is None
    closed(learner)


@pytest.mark.parametrize("ids", ["12", 5, None])
def test_ids_that_are_no_list_are_refused(ids: Any, tmp_path: Path) -> None:
    learner = learner_in(tmp_path, net(5))
    run(learner, blobs(20, LABELS))
    with pytest.raises(StreamError, match="are not a list"):
        learner.forget(ids)
    closed(learner)


def test_a_number_between_two_ids_is_that_of_neither(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, net(5))
    first = run(learner, blobs(20, LABELS))[0].sample_id
    number: Any = first + 0.7
    assert learner.label(number, 1).refused == "no such sample"
    with pytest.raises(StreamError, match="none of these samples is here"):
        learner.forget([number, None])  # type: ignore[list-item]
    assert learner.label(np.int64(first), 1).refused == ""  # type: ignore[arg-type]
    closed(learner)


def test_a_round_that_trained_on_what_is_forgotten_does_not_bring_it_back(tmp_path: Path) -> None:
    learner, ids = taught(tmp_path)
    learner.save()
    knows = LabelledWeights.of(learner._classifier)
    learner.forget(ids, alpha=2.0)
    forgot = LabelledWeights.of(learner._classifier)
    # As if the round had taught it once more, from the model before.
    learned = change_between(forgot, knows)
    inbox = RoundInbox(tmp_path)
    inbox.leave(RoundChange("began before", "", learned))
    learner.tick()
    assert same(weights(learner), dict(forgot.weights)) and learner.rounds.taken == 0
    closed(learner)
    again = learner_in(tmp_path, net(5), optimizer_fn=gently)
    inbox.leave(RoundChange("also", "", learned))
    again.tick()
    assert same(weights(again), dict(forgot.weights))
    # One that began afterwards is taken up.
    inbox.leave(RoundChange("began later", again.rounds.last, learned))
    again.tick()
    assert again.rounds.taken == 1 and again.rounds.last == "began later"
    closed(again)
