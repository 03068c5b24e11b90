"""No label is a value of its own: classes of any whole numbers are learned alike, through every way in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_ones import slow_unless
from toy_streams import (
    blobs,
    closed,
    delete_class,
    in_memory,
    learner_in,
    net,
    relabelled,
    run,
    same,
    weights,
)

from fl_elastic.errors import StreamDataError
from fl_elastic.state.codec import from_archive, to_archive
from fl_elastic.streaming import ClosedForm, SampleStore, StreamLearner, Trigger
from fl_elastic.streaming.progress import StreamRecord
from fl_elastic.streaming.solved_head import SolvedHead
from fl_elastic.streaming.sources import open_source
from fl_elastic.streaming.summary import stream_summary

PAIRS = [(0, 1), (-1, 1), (-2, -1), (5, -(2**31))]


def lived(folder: Path, names: Mapping[int, int], late: bool) -> dict[str, Any]:
    """What comes of one stream whose classes have these names: cut off after a while, and taken up again."""
    stream = blobs(300, (0, 1))
    folder.mkdir()
    learner = learner_in(folder)
    for place, (x, y) in enumerate(stream):
        if place == 150:
            # As after a kill, but for the descriptor.
            learner.store.close()
            learner = learner_in(folder)
        # Every seventh has no label at all.
        label = None if place % 7 == 3 else names[y]
        seen = learner.observe(x, None if late else label)
        assert not seen.refused
        if late and label is not None:
            assert seen.sample_id is not None
            assert not learner.label(seen.sample_id, label).refused
    found = told(learner, {new: old for old, new in names.items()})
    closed(learner)
    again = learner_in(folder)
    assert same(weights(again), found["weights"])
    closed(again)
    return found


def told(learner: StreamLearner, back: Mapping[int, int]) -> dict[str, Any]:
    """All that a learner says, with its classes under the names of the plain stream."""
    summary = stream_summary(learner)
    drop = {
        "environment",
        "classes",
        "stored",
        "points",
        "store_bytes",
        "training_seconds",
        "adapted",
    }
    stored = {None if y is None else back[y]: n for y, n in learner.store.classes.items()}
    return {
        "classes": [back[label] for label in learner.classes],
        "stored": stored,
        "none": summary["stored"]["none"] == stored[None],
        "held": [back[row.y] for row in learner._memory.held_out if row.y is not None],
        "weights": weights(learner),
        **{name: value for name, value in summary.items() if name not in drop},
    }


@pytest.mark.parametrize(
    ("pair", "late"),
    slow_unless(
        lambda pair, late: late or pair == PAIRS[1],
        [*((pair, False) for pair in PAIRS[1:]), (PAIRS[-1], True)],
    ),
)
def test_any_two_numbers_are_learned_as_0_and_1(
    pair: tuple[int, int], late: bool, tmp_path: Path
) -> None:
    plain = lived(tmp_path / "plain", {0: 0, 1: 1}, late)
    other = lived(tmp_path / "other", {0: pair[0], 1: pair[1]}, late)
    assert plain["labelled"] == sum(place % 7 != 3 for place in range(300)) == 257
    assert same(plain.pop("weights"), other.pop("weights"))
    assert plain == other and plain["none"]


def test_samples_of_a_class_are_told_from_those_without_a_label(tmp_path: Path) -> None:
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    with SampleStore(tmp_path / "samples.db", 2**20, policy="class_balanced") as store:
        store.add(x, [-1, None, 0, -2, None, -1])
        assert store.classes == {-1: 2, None: 2, 0: 1, -2: 1}
        everything = store.sample(10, labelled=False)
        assert sorted(everything.ids[np.ma.getmaskarray(everything.y)].tolist()) == [2, 5]
        labelled = store.sample(10)
        assert not np.ma.isMaskedArray(labelled.y)
        assert sorted(labelled.y.tolist()) == [-2, -1, -1, 0]
        # What was read is taken as it was given.
        ids = store.add(everything.x, everything.y)
        assert None not in ids and store.classes == {-1: 4, None: 4, 0: 2, -2: 2}
        assert relabelled(store, 2, -2) and delete_class(store, -1) == 4
        assert store.classes == {None: 3, 0: 2, -2: 3}


@pytest.mark.parametrize("head", [None, ClosedForm()])
def test_a_second_label_is_the_one_that_counts_wherever_the_sample_is(
    head: ClosedForm | None, tmp_path: Path
) -> None:
    """Also in the window, which judges each new head, and among the samples of the next adaptation."""
    stream = blobs(130, (0, 1))
    learner = learner_in(tmp_path, head=head)
    run(learner, [(x, 1 - y) for x, y in stream])
    seen = [learner.label(number, y) for number, (_, y) in enumerate(stream, 1)]
    assert not any(each.refused for each in seen)
    assert learner.progress.labelled == 130

    def labels() -> dict[int, int | None]:
        recent = learner._memory.recent
        rows = [*recent.new, *recent.held_out, *learner._memory.known(range(1, 131))]
        assert {row.y for row in rows if row.y != stream[row.number - 1][1]} == set()
        return {row.number: row.y for row in rows}

    assert len(recent := labels()) == 130 and len(learner._memory.held_out) == 13
    before = in_memory(learner)
    # As after a kill, but for the descriptor: the labels come from the log.
    learner.store.close()
    learner = learner_in(tmp_path, head=head)
    assert same(in_memory(learner), before) and labels() == recent
    for _ in range(4):
        done = learner.adapt()
        assert done is not None and not done.undone
    right = [learner.observe(x, y).correct for x, y in blobs(60, (0, 1), seed=5)]
    assert np.mean(right) > 0.9
    closed(learner)


def test_a_held_out_sample_may_be_of_a_class_that_no_other_has(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(12, (0, 1)))
    (held,) = learner._memory.held_out
    assert not learner.label(held.number, 7).refused and learner.classes[-1] == 7
    assert learner.label(held.number + 100, 7).refused == "no such sample"
    closed(learner)


def test_classes_that_are_no_numbers_are_refused_with_what_to_do(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    for label, shown in (("cat", "'cat'"), (0.5, "0.5"), (np.str_("dog"), "'dog'")):
        seen = learner.observe(blobs(1)[0][0], label)
        assert seen.refused == f"the label {shown} is not a class number: number the classes"
    seen = learner.observe(blobs(1)[0][0], 10**12)
    assert (
        seen.refused
        == "the label 1000000000000 is not a class number of 32 bits: number the classes"
    )
    assert learner.observe(blobs(1)[0][0], "-1").refused == "" and learner.classes == (-1,)
    closed(learner)


def test_a_table_has_an_empty_field_for_no_label(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,label\n1,-1\n2,\n3, 1\n4,cat\n5,\n6,NaN\n")
    found = [reading.y for reading in open_source(f"csv:{tmp_path}/t.csv")]
    assert found == [-1, None, 1, "cat", None, None]


def test_a_folder_has_nan_for_no_label(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=[-1.0, np.nan, 1.0])
    assert [reading.y for reading in open_source(f"dir:{tmp_path}")] == [-1, None, 1]


def test_a_record_comes_back_with_its_labels() -> None:
    record = StreamRecord(every=2)
    record.mark(2, 10, {None: 3, -1: 4, 0: 1})
    assert record.points[0].stored == {"none": 3, "-1": 4, "0": 1}
    assert from_archive(StreamRecord, to_archive(record)) == record


@pytest.mark.slow
@pytest.mark.parametrize("head", [None, ClosedForm()])
@pytest.mark.parametrize("size", [1, 9])
def test_a_label_that_comes_with_a_sample_sent_again_is_its_label(
    size: int, head: ClosedForm | None, tmp_path: Path
) -> None:
    """As `label` gives it, and not lost by a kill; sent a third time it changes nothing."""
    stream = blobs(90, (0, 1))
    by_label, by_sample = (learner_in(tmp_path / name, net(2), head=head) for name in "ab")
    for start in range(0, 90, size):
        part = range(start, min(start + size, 90))
        xs, ys = [stream[place][0] for place in part], [stream[place][1] for place in part]
        names = [f"row-{place}" for place in part]
        first = by_label.observe_batch(xs, names=names)
        told = [by_label.label(name, y) for name, y in zip(names, ys, strict=True)]
        seen = by_sample.observe_batch(
            [*xs, *xs], [*([None] * len(xs)), *ys], names=[*names, *names]
        )
        third = by_sample.observe_batch(xs, ys, names=names)
        assert [each.again for each in seen] == [False] * len(xs) + [True] * len(xs)
        assert [each.sample_id for each in seen[len(xs) :]] == [place + 1 for place in part]
        assert all(each.again and not each.refused for each in third)
        if head is None and size == 1:
            assert [each.prediction for each in seen[: len(xs)]] == [
                each.prediction for each in first
            ]
            assert [each.correct for each in seen[len(xs) :]] == [each.correct for each in told]
    assert by_sample.progress.observed == by_sample.progress.labelled == 90
    before = in_memory(by_sample)
    if size == 1:
        assert by_sample.progress == by_label.progress
        # Two samples go through the model together, which rounds otherwise.
        for found, expected in (
            (before, in_memory(by_label)),
            (weights(by_sample), weights(by_label)),
        ):
            assert all(np.allclose(found[n], w, atol=1e-4) for n, w in expected.items())
    by_sample.store.close()
    again = learner_in(tmp_path / "b", net(2), head=head)
    assert again.progress == by_sample.progress and same(in_memory(again), before)
    assert again.observe_batch([stream[5][0]], [7], names=["row-5"])[0].again
    assert 7 in [row.y for row in [*again._memory.known([6]), *again._memory.held_out]]
    closed(again)
    closed(by_label)


def test_what_is_sent_again_with_no_label_that_can_be_says_so(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, net(2), most_classes=2)
    run(learner, blobs(12, (0, 1)))
    x = blobs(1)[0][0]
    learner.observe_batch([x], names=["one"])
    found = learner.observe_batch([x, x], [9, "cat"], names=["one", "one"])
    assert [each.refused[:20] for each in found] == ["a label beyond 2 cla", "the label 'cat' is n"]
    assert learner.progress.labelled == 12 and sum(learner.progress.rejected.values()) == 2
    closed(learner)


@pytest.mark.parametrize("head", [None, ClosedForm()])
def test_a_label_of_a_sample_that_the_store_gave_up_is_scored_and_said_not_to_be_learned(
    head: ClosedForm | None, tmp_path: Path
) -> None:
    stream = blobs(40, (0, 1))
    learner = learner_in(tmp_path, net(2), head=head, trigger=Trigger(10, None))
    ids = [learner.observe(x).sample_id for x, _ in stream]
    # As if others had needed their room.
    learner.store.delete(ids[5:])
    seen = [learner.label(place, y) for place, (_, y) in enumerate(stream, 1)]
    assert [each.sample_id for each in seen] == [*ids[:5], *([None] * 35)]
    assert all(each.correct is not None and not each.refused for each in seen)
    progress = learner.progress
    assert (progress.labelled, progress.unlearned, progress.since) == (40, 35, 5)
    assert progress.adaptations == 0
    if isinstance(learner.rule, SolvedHead):
        assert learner.rule.sums.weight == 5
    else:
        assert [row.number for row in learner._memory.recent.new] == ids[:5]
    assert stream_summary(learner)["unlearned"] == 35
    learner.store.close()
    again = learner_in(tmp_path, net(2), head=head, trigger=Trigger(10, None))
    assert again.progress == progress
    closed(again)


@pytest.mark.slow
@pytest.mark.parametrize("head", [None, ClosedForm()])
def test_labels_that_come_too_late_to_be_scored_are_learned_as_any_others(
    head: ClosedForm | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def delayed(folder: Path, delay: int = 100) -> StreamLearner:
        learner, stream = (
            learner_in(folder, net(2), head=head, trigger=Trigger(10, None)),
            blobs(400),
        )
        for place, (x, _) in enumerate(stream):
            learner.observe(x)
            if place >= delay:
                learner.label(place - delay + 1, stream[place - delay][1])
        return learner

    waiting = delayed(tmp_path / "all")
    assert waiting.progress.labelled == 300 and "no accuracy" not in caplog.text
    monkeypatch.setattr("fl_elastic.streaming.guard._WAITING", 50)
    late = delayed(tmp_path / "few")
    assert (late.progress.labelled, late.progress.unlearned) == (0, 0)
    assert late.progress.adaptations == waiting.progress.adaptations > 3
    assert same(weights(late), weights(waiting))
    assert caplog.text.count("not counted in the accuracy") == 1
    closed(late)
    closed(waiting)


def test_other_classes_at_a_restart_are_refused(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, net(2), classes=(4, 2))
    run(learner, blobs(20, (2, 4, 7)))
    closed(learner)
    for other in ((2, 4), (4, 2, 9), (7,)):
        with pytest.raises(
            StreamDataError, match=r"the saved classes begin with \[4.* leave classes="
        ):
            learner_in(tmp_path, net(2), classes=other)
    for same_beginning in ((), (4,), (4, 2), (4, 2, 7)):
        again = learner_in(tmp_path, net(2), classes=same_beginning)
        assert again.classes == (4, 2, 7)
        closed(again)
