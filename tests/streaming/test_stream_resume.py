"""After a restart the learner goes on as if there had been none; after a kill, from what was saved last."""

from __future__ import annotations

import copy
import errno
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from toy_streams import (
    blobs,
    closed,
    learner_in,
    net,
    relabelled,
    run,
    same,
    weights,
)

from fl_elastic.errors import StreamError
from fl_elastic.state import archive as storage
from fl_elastic.streaming import ClosedForm, Latent, Trigger
from fl_elastic.streaming.learner_state import load_state

STATE = "learner.state"
KIND = storage.Kind("fl_elastic.stream", 3)


def test_what_came_after_the_last_save_is_taken_up_again_once(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, net(2))
    run(learner, blobs(60, [0, 1]))
    saved = weights(learner)
    ids = [learner.observe(x).sample_id for x, _ in blobs(10, [0, 1], seed=1)]
    learner.observe(np.zeros(3))
    assert relabelled(learner.store, ids[0], 4)
    there = learner.store.seen
    learner.store.close()
    again = learner_in(tmp_path, model=net(2))
    known = load_state(tmp_path / STATE)
    assert known is not None and known.progress.observed == 50
    assert again.progress == learner.progress and again.progress.observed == 70
    assert sum(again.progress.rejected.values()) == 1
    assert again.store.seen == there == 70 - len(again._memory.held_out)
    assert [row.number for row in again._memory.held_out] == [
        row.number for row in learner._memory.held_out
    ]
    # A label that only the store knows has its output all the same.
    assert again.classes == (*learner.classes, 4)
    head = again.model.get_submodule("5")
    assert isinstance(head, nn.Linear) and head.out_features == 3
    assert np.array_equal(head.weight.detach().numpy()[:2], saved["5.weight"])
    # Ids go on, and late labels still reach the store.
    assert again.label(ids[1], 1).refused == "" and int(again.store.take([ids[1]]).y[0]) == 1
    assert again.observe(blobs(1)[0][0]).sample_id == ids[-1] + 1
    closed(again)


def test_a_new_class_is_saved_at_once(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, net(1), trigger=Trigger(10**6, None))
    for x, y in blobs(9, [8, 3, 5]):
        learner.observe(x, y)
    learner.store.close()
    state = load_state(tmp_path / STATE)
    assert state is not None and state.classifier.classes == learner.classes
    again = learner_in(tmp_path, model=net(1), trigger=Trigger(10**6, None))
    assert again.classes == learner.classes and same(weights(again), weights(learner))
    closed(again)


def test_it_saves_now_and_then(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, trigger=Trigger(10**6, None), save_every=20)
    run(learner, blobs(55))
    state = load_state(tmp_path / STATE)
    assert state is not None and state.progress.observed == 40
    closed(learner)
    state = load_state(tmp_path / STATE)
    assert state is not None and state.progress.observed == 55


def test_a_full_disk_costs_the_state_and_not_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(60))
    before = (tmp_path / STATE).read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_atomically", full)
        seen = run(learner, blobs(60, seed=1))
    assert sum(each.adapted for each in seen) == 1 and learner.progress.saves_failed == 1
    assert "No space left" in caplog.text and (tmp_path / STATE).read_bytes() == before
    assert learner.save() and (tmp_path / STATE).read_bytes() != before
    closed(learner)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign", "text"])
def test_a_damaged_state_is_put_aside_and_said(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(60))
    closed(learner)
    path = tmp_path / STATE
    data = bytearray(path.read_bytes())
    if damage == "foreign":
        with path.open("wb") as file:
            np.savez(file, weights=np.zeros(3))
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(
            {"cut": data[: len(data) // 2], "flipped": data, "empty": b"", "text": b"{}"}[damage]
        )
    with caplog.at_level(logging.ERROR):
        again = learner_in(tmp_path)
    assert "put aside as learner.state.damaged-1" in caplog.text
    assert (tmp_path / "learner.state.damaged-1").exists()
    # What the store has is learned from all the same.
    assert again.progress.observed == 0 and set(again.classes) == {0, 1, 2}
    assert again.adapt() is not None
    closed(again)


def test_the_state_of_another_model_or_release_is_refused(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(60))
    closed(learner)
    with pytest.raises(StreamError, match=r"another model.*give that one, or another state_dir"):
        learner_in(tmp_path, nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
    path = tmp_path / STATE
    state = storage.read_archive(path, KIND)
    storage.write_archive(path, replace(KIND, version=99), state.facts, state.arrays)
    with pytest.raises(StreamError, match="version 99"):
        learner_in(tmp_path)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(
    ("before", "now", "what"),
    [
        ({}, {"latent": Latent(1)}, "inputs"),
        ({}, {"head": ClosedForm()}, "inputs"),
        ({"latent": Latent(1)}, {}, "features"),
        ({"head": ClosedForm()}, {}, "features"),
    ],
)  # fmt: skip
def test_samples_of_another_form_are_neither_mixed_nor_deleted(
    before: dict[str, Any], now: dict[str, Any], what: str, saved: bool, tmp_path: Path
) -> None:
    learner = learner_in(tmp_path, **before)
    run(learner, blobs(100))
    kept = len(learner.store)
    closed(learner)
    if not saved:
        (tmp_path / "learner.state").unlink()
    with pytest.raises(StreamError, match=f"{what} of samples were kept in .* so far"):
        learner_in(tmp_path, **now)
    again = learner_in(tmp_path, **before)
    assert len(again.store) == kept > 80
    closed(again)


def test_a_damaged_store_is_replaced_while_learning(tmp_path: Path) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(120))
    learner.store.close()
    size = (tmp_path / "samples.db").stat().st_size
    (tmp_path / "samples.db").write_bytes(np.random.default_rng(0).bytes(size))
    again = learner_in(tmp_path)
    assert list(tmp_path.glob("samples.db.damaged*"))
    seen = run(again, blobs(60, seed=2))
    assert again.progress.observed == 180 and sum(each.adapted for each in seen) == 1
    assert np.mean([bool(each.correct) for each in seen]) > 0.8
    closed(again)


def at(facts: Any, place: tuple[str, ...]) -> Any:
    for name in place:
        facts = facts[name]
    return facts


@pytest.mark.parametrize("value", [None, 3, "x", [[1]], {"x": []}, -1e400, "missing"])
def test_a_state_that_somebody_wrote_is_read_or_refused_in_one_line(
    value: Any, tmp_path: Path
) -> None:
    learner = learner_in(tmp_path)
    run(learner, blobs(60))
    closed(learner)
    path = tmp_path / STATE
    state = storage.read_archive(path, KIND)
    crafted = []
    for place in [
        (),
        ("classifier",),
        ("progress",),
        ("recent",),
        ("rule",),
        ("rule", "selection"),
    ]:
        for name in at(state.facts, place):
            facts = copy.deepcopy(dict(state.facts))
            if value == "missing":
                del at(facts, place)[name]
            else:
                at(facts, place)[name] = value
            crafted.append(storage.Archive(facts, state.arrays))
    for name in state.arrays:
        arrays = {**state.arrays, name: np.array("x" if value is None else str(value))}
        if value == "missing":
            del arrays[name]
        crafted.append(storage.Archive(state.facts, arrays))
    refused = 0
    for each in crafted:
        storage.write_archive(path, KIND, each.facts, each.arrays)
        try:
            closed(learner_in(tmp_path))
        except StreamError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
    assert refused
