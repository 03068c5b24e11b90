"""What a round has left reaches the learner once, whole, and only if it is no worse: whoever dies in between."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_ones import slow_unless

from fl_elastic.budget import Budget
from fl_elastic.flower.records import PACKED
from fl_elastic.flower.stream_client import StreamClient
from fl_elastic.state.archive import Kind, read_archive, write_archive
from fl_elastic.streaming import Guard, Latent, StreamLearner, Trigger
from fl_elastic.streaming.labelled_weights import LabelledWeights
from fl_elastic.streaming.round_inbox import RoundChange, RoundInbox
from fl_elastic.update import Manifest, weights_of
from fl_elastic.update.model_wire import encode_weights

sys.path.append(str(Path(__file__).parents[1] / "streaming"))
from toy_streams import adam, blobs, closed, learner_in, net, run, same, weights

HEAD = ("5.weight", "5.bias")


def learned(folder: Path, count: int = 200) -> StreamLearner:
    learner = learner_in(folder, trigger=Trigger(50, None), guard=Guard(every=4, size=16))
    run(learner, blobs(count))
    learner.save()
    return learner


def change_of(
    learner: StreamLearner,
    by: Callable[[np.ndarray], np.ndarray],
    name: str = "one",
    after: str = "",
) -> RoundChange:
    """A change of every tensor."""
    changed = {key: by(value) for key, value in weights(learner).items()}
    return RoundChange(name, after, LabelledWeights(changed, learner.classes, HEAD))


def slightly(value: np.ndarray) -> np.ndarray:
    return np.full_like(value, 1e-3)


def inbox_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "inbox").iterdir())


def test_it_is_taken_up_at_the_next_sample_and_deleted(tmp_path: Path) -> None:
    learner = learned(tmp_path)
    before = weights(learner)
    RoundInbox(tmp_path).leave(change_of(learner, slightly))
    run(learner, blobs(1, seed=9))
    for name, value in weights(learner).items():
        np.testing.assert_allclose(value, before[name] + 1e-3, rtol=1e-5, atol=1e-6)
    assert inbox_files(tmp_path) == [] and learner.rounds.last == "one"
    RoundInbox(tmp_path).leave(change_of(learner, slightly, "two", after="one"))
    learner.tick()
    assert learner.rounds.taken == 2 and learner.rounds.last == "two"
    closed(learner)
    assert learner_in(tmp_path).rounds == learner.rounds


@pytest.mark.parametrize(
    ("by", "why"),
    [
        (lambda value: -2 * value, "accuracy on held-out samples fell"),
        (lambda value: np.full_like(value, np.nan), "would not be finite"),
        (lambda value: np.full_like(value, 1e38), "held-out samples|would not be finite"),
        (lambda value: value.astype(np.float64), "another shape or type"),
        (lambda value: value[..., None], "another shape or type"),
    ],
)
def test_what_is_worse_is_put_back(
    tmp_path: Path,
    by: Callable[[np.ndarray], np.ndarray],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner = learned(tmp_path)
    before, classes = weights(learner), learner.classes
    with np.errstate(all="ignore"):
        RoundInbox(tmp_path).leave(change_of(learner, by))
        assert learner.apply_round_result()
    assert same(weights(learner), before) and learner.classes == classes
    assert learner.rounds.undone == 1 and inbox_files(tmp_path) == []
    assert re.search(why, caplog.text)
    run(learner, blobs(60, seed=9))
    closed(learner)


def test_a_new_class_of_a_round_that_is_put_back_is_not_known(tmp_path: Path) -> None:
    learner = learned(tmp_path)
    before, classes = weights(learner), learner.classes
    bad = {n: -2 * v for n, v in before.items()}
    bad |= {n: np.concatenate([bad[n], bad[n][:1]]) for n in HEAD}
    change = LabelledWeights(bad, (*classes, 8), HEAD)
    RoundInbox(tmp_path).leave(RoundChange("one", "", change, new=(8,)))
    assert (
        learner.apply_round_result() and learner.classes == classes and learner.rounds.undone == 1
    )
    kept = weights(learner)
    assert all(np.array_equal(kept[n][: len(before[n])], before[n]) for n in before)
    seen = run(learner, [*blobs(40, seed=3), *blobs(40, [8], seed=3), *blobs(40, seed=4)])
    assert learner.classes == (*classes, 8) and not any(each.refused for each in seen)
    closed(learner)


def test_what_was_learned_meanwhile_stays(tmp_path: Path) -> None:
    learner = learned(tmp_path)
    left = change_of(learner, slightly)
    run(learner, blobs(50, seed=3))
    adapted = weights(learner)
    RoundInbox(tmp_path).leave(left)
    learner.apply_round_result()
    for name, value in weights(learner).items():
        np.testing.assert_allclose(value, adapted[name] + 1e-3, rtol=1e-5, atol=1e-6)
    closed(learner)


def test_a_result_from_before_another_one_was_taken_is_left_out(tmp_path: Path) -> None:
    learner = learned(tmp_path)
    inbox = RoundInbox(tmp_path)
    inbox.leave(change_of(learner, slightly, "one"))
    learner.apply_round_result()
    now = weights(learner)
    inbox.leave(change_of(learner, slightly, "two", after=""))
    assert (
        learner.apply_round_result() and same(weights(learner), now) and inbox_files(tmp_path) == []
    )
    assert learner.rounds.last == "one" and learner.rounds.taken == 1
    closed(learner)


def test_one_that_dies_after_saving_does_not_take_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learned(tmp_path)
    inbox = RoundInbox(tmp_path)
    inbox.leave(change_of(learner, slightly))
    with monkeypatch.context() as dying:
        dying.setattr(RoundInbox, "done", lambda self: None)
        learner.apply_round_result()
    taken = weights(learner)
    learner.store.close()
    assert inbox_files(tmp_path) == ["claimed.state"]
    # Another result comes before it is back: it is not lost behind the claimed one.
    inbox.leave(change_of(learner, slightly, "two", after="one"))
    again = learner_in(tmp_path)
    assert again.apply_round_result() and same(weights(again), taken) and again.rounds.taken == 1
    assert again.apply_round_result() and again.rounds.taken == 2 and inbox_files(tmp_path) == []
    closed(again)


def test_one_that_dies_before_saving_takes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learned(tmp_path)
    before = weights(learner)
    RoundInbox(tmp_path).leave(change_of(learner, slightly))
    with monkeypatch.context() as full_disk:
        full_disk.setattr("fl_elastic.state.archive.write_atomically", _no_space)
        learner.apply_round_result()
        assert not learner.apply_round_result(), "it has it already"
        assert learner.rounds.taken == 1
    learner.store.close()
    again = learner_in(tmp_path)
    assert again.apply_round_result() and again.rounds.taken == 1
    np.testing.assert_allclose(weights(again)["5.bias"], before["5.bias"] + 1e-3, atol=1e-6)
    closed(again)


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("content", [b"", b"x" * 1000])
def test_a_damaged_result_is_passed_over(tmp_path: Path, content: bytes) -> None:
    learner = learned(tmp_path)
    before = weights(learner)
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "round.state").write_bytes(content)
    run(learner, blobs(2, seed=9))
    assert same(weights(learner), before) and inbox_files(tmp_path) == []
    closed(learner)


@pytest.mark.parametrize(
    "value",
    slow_unless(
        lambda value: value in (None, "x", [10**30]),
        [None, 3, "x", [[1]], {"x": []}, ["x"], [10**30]],
    ),
)
def test_a_result_that_somebody_wrote_costs_no_learning(tmp_path: Path, value: Any) -> None:
    learner = learned(tmp_path)
    RoundInbox(tmp_path).leave(change_of(learner, slightly))
    path = tmp_path / "inbox" / "round.state"
    honest = read_archive(path, Kind("fl_elastic.round", 2))
    for number, name in enumerate(honest.facts):
        fresh = {**honest.facts, "name": f"the {number}th", "after": learner.rounds.last}
        facts = {**fresh, name: value}
        write_archive(path, Kind("fl_elastic.round", 2), facts, honest.arrays)
        learner.apply_round_result()
        assert all(np.isfinite(each).all() for each in weights(learner).values())
    assert inbox_files(tmp_path) == []
    closed(learner)


def test_a_result_of_another_model_is_passed_over(tmp_path: Path) -> None:
    learner = learned(tmp_path)
    before = weights(learner)
    other = {"0.weight": before["0.weight"]}
    RoundInbox(tmp_path).leave(RoundChange("one", "", LabelledWeights(other, (0,), ())))
    learner.apply_round_result()
    assert same(weights(learner), before) and learner.rounds.undone == 1
    closed(learner)


def test_a_learner_of_features_takes_nothing(tmp_path: Path) -> None:
    learner = learner_in(tmp_path, latent=Latent(1), encoding="int8")
    run(learner, blobs(60))
    before, stored = weights(learner), len(learner.store)
    RoundInbox(tmp_path).leave(change_of(learner, slightly))
    learner.apply_round_result()
    assert same(weights(learner), before) and len(learner.store) == stored
    closed(learner)


def take_rounds_for_ever(folder: Path) -> None:
    """A process of rounds beside the learner's."""
    model = net()
    manifest = Manifest.of(model)
    number = 0
    while True:
        number += 1
        packed = encode_weights(weights_of(net(seed=number % 3), manifest), manifest)
        client = StreamClient(
            net(), folder, budget=Budget(), policy="full", optimizer_fn=adam, steps=3,
            joining=(0.5,),
        )  # fmt: skip
        client.fit([np.frombuffer(packed, np.uint8)], {PACKED: True})


def learn_for_ever(folder: Path) -> None:
    learner = learner_in(folder, steps=3, trigger=Trigger(20, None), save_every=7)
    while True:
        run(learner, blobs(50, seed=learner.progress.observed))


def started(work: Callable[[Path], None], folder: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            sys.stderr = open(os.devnull, "w")
            work(folder)
        finally:
            os._exit(1)
    return child


@pytest.mark.slow
def test_learner_and_rounds_are_killed_again_and_again(tmp_path: Path) -> None:
    draw, taken = random.Random(0), 0
    closed(learned(tmp_path))
    for life in range(20):
        children = [started(learn_for_ever, tmp_path), started(take_rounds_for_ever, tmp_path)]
        time.sleep(draw.uniform(0.1, 1.2))
        draw.shuffle(children)
        for child in children:
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"one ended by itself in life {life}"
        learner = learner_in(tmp_path)
        assert learner.rounds.taken >= taken
        taken = learner.rounds.taken
        assert all(np.isfinite(value).all() for value in weights(learner).values())
        assert len(learner.store) == sum(learner.store.classes.values())
        assert not list(tmp_path.rglob("*.damaged*"))
        assert set(inbox_files(tmp_path)) <= {"round.state", "claimed.state"} | {
            name for name in inbox_files(tmp_path) if name.endswith(".tmp")
        }
        learner.store.close()
    assert taken > 20
    learner = learner_in(tmp_path)
    run(learner, blobs(300, seed=77))
    assert learner.progress.accuracy > 0.8
    closed(learner)
