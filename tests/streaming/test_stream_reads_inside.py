"""A stream whose head reads inside of a model, where it was told or by its own choice: all else is as ever."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_ones import slow_unless
from torch import nn

from fl_elastic.errors import PlanError, StreamError
from fl_elastic.state.codec import to_archive
from fl_elastic.streaming import ClosedForm, Guard, SampleStore, StreamLearner, reading_place
from fl_elastic.streaming.learner_state import StateFolder
from fl_elastic.streaming.stream_options import StreamOptions
from fl_elastic.training.read_out import readout_of

FIRST = 96


def whole(outputs: int = 2) -> nn.Module:
    """Return the same network each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(4, outputs),
        ).eval()  # fmt: skip


def reading() -> nn.Module:
    """Return one that ends inside of it, at two places side by side."""
    batches = [(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))]
    return readout_of(whole(), batches, "1@grid2+2@grid1")[0]


def learner(
    folder: Path, store: SampleStore, read: str = "last", model: nn.Module | None = None
) -> StreamLearner:
    return StreamLearner(
        model or whole(), store, head=ClosedForm(read=read, most_features=300), state_dir=folder,
        detector="none", guard=Guard(every=10, size=5), options=StreamOptions(save_every=37),
    )  # fmt: skip


@contextmanager
def opened(
    folder: Path, read: str = "auto", model: nn.Module | None = None, capacity: int = 2**21
) -> Iterator[StreamLearner]:
    """Give a learner that is killed in the end."""
    folder.mkdir(exist_ok=True)
    with SampleStore(folder / "samples.db", capacity) as store:
        made = learner(folder, store, read, model)
        yield made
        made._log.close()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples choose a place."""
    monkeypatch.setattr(reading_place, "EXAMPLES", FIRST)


def images(count: int, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    draw, labels = np.random.default_rng(0), np.arange(count) % 3
    x = noise * draw.normal(size=(count, 1, 8, 8)).astype(np.float32)
    for image, label in zip(x, labels, strict=True):
        image[0, 4 * (label // 2) :, 4 * (label % 2) :] += 1.0
    return x, labels


def told(learner: StreamLearner, x: np.ndarray, y: Any, start: int = 0, together: int = 9) -> int:
    """Show it samples from a place on; return how many it was right of."""
    right = 0
    for first in range(start, len(x), together):
        rows = slice(first, min(first + together, len(x)))
        labels = None if y is None else y[rows]
        seen = learner.observe_batch(x[rows], labels)
        right += sum(bool(each.correct) for each in seen)
    return right


def known(learner: StreamLearner) -> dict[str, np.ndarray]:
    """Return its sums, what it stores, and its weights."""
    head = learner._head
    assert head is not None
    head.put(learner._engine, [], guarded=False)
    rows = learner.store.take(sorted(learner.store.draw(10**6, labelled=False).tolist()))
    held = learner._memory.held_out
    return {
        **to_archive(head.sums.to_state()).arrays,
        "ids": rows.ids, "x": rows.x, "y": np.ma.filled(rows.y, -7),
        "held": np.array([each.number for each in held]), "held_x": np.array([each.x for each in held]),
    }  # fmt: skip


def alike(one: StreamLearner, other: StreamLearner) -> None:
    """Check that both have learned the same, with the same features."""
    ours, theirs = known(one), known(other)
    assert ours.keys() == theirs.keys() and len(ours["ids"]) > 50
    for name, each in ours.items():
        scale = float(np.abs(theirs[name]).max(initial=1.0))
        np.testing.assert_allclose(each, theirs[name], rtol=0, atol=1e-6 * scale, err_msg=name)
    assert one.classes == other.classes and one.reads == other.reads


def test_it_learns_new_classes_and_goes_on_where_it_was(tmp_path: Path) -> None:
    x, labels = images(90)
    with SampleStore(tmp_path / "s.db", 2**20) as store:
        with learner(tmp_path, store, model=reading()) as first:
            first.observe_batch(x[:60], labels[:60])
            assert first.forget([3]).exact
            scores = first.model(torch.from_numpy(x))
        assert (scores.argmax(1).numpy() == labels).mean() > 0.9
        with learner(tmp_path, store, model=reading()) as second:
            assert second.classes == (0, 1, 2)
            assert torch.equal(second.model(torch.from_numpy(x)), scores)
            second.observe_batch(x[60:], labels[60:])
            assert not torch.equal(second.model(torch.from_numpy(x)), scores)


def test_the_first_samples_choose_and_count_as_if_it_had_read_there_before(
    tmp_path: Path, few: None
) -> None:
    x, y = images(240, noise=1.5)
    batches = [(torch.from_numpy(x[:FIRST]), torch.from_numpy(y[:FIRST]))]
    chosen, choice = readout_of(whole(3), batches, most_features=300)
    assert choice is not None and choice.best.name != "in:5@flat"
    with opened(tmp_path / "own") as own, opened(tmp_path / "told", "last", chosen) as other:
        right = told(own, x[:90], y[:90])
        assert own.reads == "" and len(own.store) == 0 and own.progress.observed == 90
        assert right > 30
        right += told(own, x, y, 90)
        # What it said before the choice is not made better by it.
        assert own.progress.right == right < told(other, x, y)
        assert own.reads == choice.best.name == other.reads
        assert own.progress.observed == own.progress.labelled == 240
        alike(own, other)
        with torch.no_grad():
            assert (own.model(torch.from_numpy(x)).argmax(1).numpy() == y).mean() > 0.8


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed < 1, range(6)))
def test_a_kill_changes_nothing(
    seed: int, tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the choice, after it, and while the state is not on the disk yet that knows of it."""
    draw, (x, y) = np.random.default_rng(seed), images(200)
    late = draw.permutation(200)[:60]
    events: list[tuple[str, int]] = []
    for number in range(1, 201):
        events.append(("seen", number))
        due = [each for each in late + 1 if each <= number and draw.random() < 0.1]
        events += [("label", int(each)) for each in due]

    def go(learner: StreamLearner, some: list[tuple[str, int]]) -> None:
        for what, number in some:
            label = int(y[number - 1])
            if what == "label":
                learner.label(number, label)
            else:
                learner.observe(x[number - 1], None if number - 1 in late else label)

    with opened(tmp_path / "whole") as never:
        go(never, events)
        assert never.reads not in ("", "last")
        place, full = tmp_path / "killed", StateFolder.save
        kills = sorted({0, *draw.integers(1, len(events), 8).tolist(), len(events)})
        for start, end in pairwise(kills):
            with opened(place) as killed, monkeypatch.context() as patch:
                if draw.random() < 0.4:
                    patch.setattr(StateFolder, "save", lambda *_: False)
                go(killed, events[start:end])
            assert StateFolder.save is full
            # Nobody has the files any more.
            place = Path(shutil.move(place, tmp_path / f"moved {end}"))
        with opened(place) as killed:
            alike(killed, never)
            assert killed.progress.observed == 200


def test_labels_that_come_late_choose_as_well(tmp_path: Path, few: None) -> None:
    x, y = images(150)
    with opened(tmp_path / "late") as late, opened(tmp_path / "named", "0@grid2") as named:
        for each in (late, named):
            told(each, x, None)
            for number in range(150, 0, -1):
                each.label(number, int(y[number - 1]))
                if number % 10 == 0:
                    # Given once more, and once wrongly in between.
                    each.label(number, int(y[number - 1] + 1) % 3)
                    each.label(number, int(y[number - 1]))
        assert late.reads not in ("", "last") and named.reads == "0@grid2"
        for each in (late, named):
            found = known(each)
            assert len(found["ids"]) == 145 and round(each._head.sums.weight) == 145  # type: ignore[union-attr]
            assert {*found["ids"].tolist(), *found["held"].tolist()} == {*range(1, 151)}
            of = dict(zip(found["ids"].tolist(), found["y"].tolist(), strict=True))
            assert all(label == y[number - 1] for number, label in of.items())


def test_samples_of_one_class_choose_nothing(tmp_path: Path, few: None) -> None:
    x, y = images(5 * FIRST)
    order = np.argsort(y, kind="stable")
    with opened(tmp_path) as learner:
        told(learner, x[order][: 2 * FIRST - 1], y[order][: 2 * FIRST - 1])
        # The first one of another class has come by now.
        assert learner.classes == (0, 1) and learner.reads == ""
        told(learner, x[order], y[order], 2 * FIRST - 1)
        assert learner.reads not in ("", "last") and learner.classes == (0, 1, 2)
        assert (learner.model(torch.from_numpy(x)).argmax(1).numpy() == y).mean() > 0.95


def test_no_more_samples_are_waited_for_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_place, "_MOST_SAMPLES", 300)
    x, y = images(320)
    with opened(tmp_path) as learner:
        # A fourth of them have labels, 74 by then.
        for number in range(320):
            learner.observe(x[number], int(y[number]) if number % 4 == 1 else None)
            assert (learner.reads == "") is (number < 299)
        assert learner.reads != "last" and round(learner._head.sums.weight) == 75  # type: ignore[union-attr]


def test_where_labels_do_not_come_the_last_layer_is_read_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = images(700)
    with opened(tmp_path, capacity=2**17) as learner:
        told(learner, x[:100], None)
        assert learner.reads == "" and (tmp_path / "events.log").stat().st_size > 2**14
        told(learner, x, None, 100)
        assert learner.reads == "last" and "too few samples have labels" in caplog.text
        assert (tmp_path / "events.log").stat().st_size < 2**16 + 2**12
        for number in learner.store.draw(10**6, labelled=False).tolist():
            learner.label(number, int(y[number - 1]))
        assert learner._head.sums.weight > 50  # type: ignore[union-attr]
    with opened(tmp_path, capacity=2**17) as learner:
        assert learner.reads == "last" and learner.progress.observed == 700


def test_what_a_lost_state_has_left_is_in_no_sums(tmp_path: Path, few: None) -> None:
    x, y = images(200)
    with opened(tmp_path) as lost:
        told(lost, x, y)
        assert lost.reads != "" and lost.save()
    (tmp_path / "learner.state").write_bytes(b"nothing")
    with opened(tmp_path) as learner:
        assert learner.reads == "" and learner.progress.observed == 0
        told(learner, x[:150], y[:150])
        ids = sorted(learner.store.draw(10**6).tolist())
        assert learner.reads != "" and len(ids) == round(learner._head.sums.weight) == 145  # type: ignore[union-attr]
        assert min(ids) >= 200
        assert learner.forget(ids[:20]).exact


def test_names_of_places_need_no_label(tmp_path: Path) -> None:
    x, y = images(40)
    with (
        opened(tmp_path / "wrong", "7@grid2") as wrong,
        pytest.raises(PlanError, match="no module"),
    ):
        wrong.observe(x[0], 0)
    # What has come is not lost.
    with opened(tmp_path / "wrong", "1@grid2") as mended:
        assert mended.reads == "1@grid2" and mended.progress.observed == 1
        told(mended, x, y, 1)
    with (
        pytest.raises(StreamError, match=r"reads 1@grid2, not 1@grid4"),
        opened(tmp_path / "wrong", "1@grid4"),
    ):
        pass
    with opened(tmp_path / "wrong", "auto") as again:
        assert again.reads == "1@grid2" and again.progress.observed == 40
    with pytest.raises(StreamError, match="already"), opened(tmp_path / "new", "auto", reading()):
        pass
    for read in ("", "1@", "first"):
        with pytest.raises(PlanError, match="not of the form"):
            ClosedForm(read=read)


def test_forgetting_is_exact_and_waits_for_the_choice(tmp_path: Path, few: None) -> None:
    x, y = images(160)
    gone = [3, 40, 77, 120]
    rest = [number for number in range(1, 161) if number not in gone]
    with opened(tmp_path / "own") as own:
        told(own, x[:40], y[:40])
        with pytest.raises(StreamError, match="forget them later"):
            own.forget([3])
        assert own.ids_of(1) == [number for number in range(1, 41) if y[number - 1] == 1]
        told(own, x[:80], y[:80], 40)
        # As many as there are choose now.
        assert own.forget(gone[:3]).exact and own.reads != ""
        told(own, x, y, 80)
        assert own.forget(gone[3:]).exact
        model = readout_of(whole(3), [(torch.from_numpy(x[:1]), torch.tensor([0]))], own.reads)[0]
        with opened(tmp_path / "never", "last", model) as never:
            told(never, x[np.array(rest) - 1], y[np.array(rest) - 1])
            for each in (own, never):
                # What is held out differs: let all of it be learned.
                each._memory.world_changed()
                each._newest_head(guarded=False)
            ours, theirs = (each._head.sums for each in (own, never))  # type: ignore[union-attr]
            assert round(ours.weight) == round(theirs.weight) == 156
            np.testing.assert_allclose(ours.mean, theirs.mean, atol=1e-5)
            heads = []
            for each in (own, never):
                each._head._head.take_penalty(1.0)  # type: ignore[union-attr]
                found = each._head._head.layer()  # type: ignore[union-attr]
                heads.append(np.hstack([found.weight, found.bias[:, None]]))
            np.testing.assert_allclose(*heads, atol=1e-5 * np.abs(heads[1]).max())
