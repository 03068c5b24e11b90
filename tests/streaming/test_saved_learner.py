"""What a round sees of a learner: copies of its saved state, and the samples that are new."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from crafted_archives import crafted
from toy_streams import blobs, closed, learner_in, net, run, same, weights

from fl_elastic.errors import StoreError, StreamError
from fl_elastic.losses import classification_loss
from fl_elastic.state.archive import Kind, read_archive, write_archive
from fl_elastic.streaming import Guard, SampleStore, Trigger
from fl_elastic.streaming.body import as_floats
from fl_elastic.streaming.saved_learner import (
    SavedLearner,
    StreamPosition,
    load_snapshot,
    open_store,
)
from fl_elastic.streaming.stream_options import Replay


def seen_of(folder: Path, outputs: int = 3) -> SavedLearner:
    return load_snapshot(folder, net(outputs), classification_loss, prepare=as_floats)


def test_a_store_is_opened_with_what_it_was_made_with(tmp_path: Path) -> None:
    made = SampleStore(
        tmp_path / "samples.db", 2**20, policy="class_balanced", encoding="fp16", seed=5
    )
    made.add(np.arange(4, dtype=np.float32), 1)
    with open_store(tmp_path / "samples.db") as opened:
        assert opened.sample(1).x.tolist() == [[0, 1, 2, 3]]
        made.add(np.ones(4, np.float32), 2)
        assert len(opened) == 2
    assert len(made) == 2
    made.close()
    with pytest.raises(StoreError, match="there is no sample store"):
        open_store(tmp_path / "other.db")
    (tmp_path / "odd.db").write_bytes(b"nonsense" * 100)
    with pytest.raises(StoreError, match="cannot read"):
        open_store(tmp_path / "odd.db")
    assert (tmp_path / "odd.db").exists(), "a round puts nothing aside"


def test_a_visit_changes_nothing_and_is_no_more_than_what_was_saved(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, guard=Guard(every=4, size=8))
    run(learner, blobs(110))
    learner.save()
    before, blank = weights(learner), net()
    state = torch.random.get_rng_state()
    seen = load_snapshot(tmp_path, blank, classification_loss, prepare=as_floats)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same(dict(seen.saved.weights), before) and seen.saved.labels == learner.classes
    assert len(seen.held_out) == 8 and 5 < len(seen.new) < 10
    assert len(seen.untrained()) == len(seen.held_out) + len(seen.new)
    for parameter in seen.classifier.model.parameters():
        parameter.data.zero_()
    assert same(weights(learner), before) and blank[0].weight.abs().sum() > 0
    seen.store.close()
    closed(learner)


def test_batches_hold_what_came_since_the_last_round_beside_what_is_stored(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(100, seed=1))
    learner.save()
    first = seen_of(tmp_path)
    position = first.position(StreamPosition())
    assert (
        position.observed == position.labelled == 100
        and position.rounds == 1
        and position.newest > 80
    )
    first.store.close()
    late = blobs(10, seed=2)
    run(learner, late)
    learner.save()
    seen = seen_of(tmp_path)
    replay = Replay(32, stored_share=0.0)
    known = {x.tobytes() for x, _ in late}
    batches = list(seen.loader(replay, 3, (1, 2), position))
    assert all(row.tobytes() in known for x, _ in batches for row in x.numpy())
    again = list(seen.loader(replay, 3, (1, 2), position))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))
    everything = list(seen.loader(replay, 20, (1, 2), StreamPosition()))
    assert not all(row.tobytes() in known for x, _ in everything for row in x.numpy())
    seen.store.close()
    closed(learner)


def test_what_came_since_the_last_round_is_all_of_it_and_each_once(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, trigger=Trigger(10**6, None))
    run(learner, blobs(300, seed=1))
    learner.save()
    with seen_of(tmp_path).store as store:
        position = StreamPosition(newest=300)
        assert len(store) > 200
    late = blobs(100, seed=2)
    run(learner, late)
    learner.save()
    seen = seen_of(tmp_path)
    x, _ = seen._since(position)
    # Learned later than the position, or not at all yet; the window alone is nobody's to train on.
    window = {row.x.tobytes() for row in seen.held_out}
    rows = [each.tobytes() for each in x]
    assert len(rows) == len(set(rows))
    assert {each.tobytes() for each, _ in late} - window <= set(rows)
    assert not window & set(rows)
    seen.store.close()
    closed(learner)


def test_a_learner_with_fewer_or_more_outputs_than_the_model_is_seen_as_it_is(
    tmp_path: Path,
) -> None:
    for outputs, labels in ((2, (0, 1)), (3, (0, 1, 2, 3, 4))):
        learner = learner_in(tmp_path / str(outputs), net(outputs))
        run(learner, blobs(60, labels))
        learner.save()
        seen = seen_of(tmp_path / str(outputs), 3)
        assert seen.saved.weights["5.bias"].shape == (max(outputs, len(labels)),)
        assert set(seen.saved.labels) == set(labels)
        seen.store.close()
        closed(learner)


def test_labels_of_samples_that_came_after_the_last_save_are_known(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(60, (0, 1)))
    learner.save()
    learner.store.add(blobs(1, [7])[0][0], 7)
    seen = seen_of(tmp_path)
    assert seen.saved.labels == learner.classes and 7 in seen.classifier.classes
    seen.store.close()
    closed(learner)


def test_nothing_to_visit_is_said(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="nothing was learned"):
        seen_of(tmp_path)


def test_a_state_that_somebody_wrote_is_visited_or_refused_in_one_line(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(60))
    closed(learner)
    path, kind = tmp_path / "learner.state", Kind("fl_elastic.stream", 3)
    state = read_archive(path, kind)
    for name in state.facts:
        for value in (None, "x", [[1]], {"x": []}):
            write_archive(path, kind, {**state.facts, name: value}, state.arrays)
            try:
                seen_of(tmp_path).store.close()
            except StreamError as error:
                assert "\n" not in str(error)
    write_archive(path, kind, {})
    with pytest.raises(StreamError, match="is no learner's state"):
        seen_of(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[1]", b'{"observed": "x"}', b'{"other": 1}', b'{"observed": Infinity}', b"FLEA",
        crafted("fl_elastic.stream_position", 1, b'{"observed": "x"}', {}), crafted("other", 1, b"{}", {}),
    ],
)  # fmt: skip
def test_a_damaged_mark_is_that_of_the_beginning(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "position.state").write_bytes(content)
    assert StreamPosition.load(tmp_path) == StreamPosition()
    StreamPosition(1, 2, 3, 4, 5).save(tmp_path)
    assert StreamPosition.load(tmp_path) == StreamPosition(1, 2, 3, 4, 5)
