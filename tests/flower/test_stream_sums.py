"""A learner whose head is in closed form takes part by its sums, without a pass over its samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import arrays_of, as_weights, quiet
from small_federation import run as run_rounds
from test_stream_client import client_of, packed
from test_stream_cut import asked, refusal
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import decode_head_sums
from fl_elastic.closed_form.sums_privacy import decode_noisy_sums
from fl_elastic.errors import StreamError
from fl_elastic.flower import PartialUpdates, RoundConfig, elastic_client_app
from fl_elastic.flower.records import PACKED
from fl_elastic.flower.tasks.rank_places import RankPlaces
from fl_elastic.flower.tasks.solve_head import SolveHead
from fl_elastic.losses import classification_loss
from fl_elastic.streaming import ClosedForm, Guard, SampleStore, StreamLearner
from fl_elastic.streaming.body import as_floats
from fl_elastic.streaming.saved_learner import SavedLearner, load_snapshot
from fl_elastic.training import evaluate
from fl_elastic.training.head_pass import head_sums
from fl_elastic.update import Manifest, load_weights

sys.path.append(str(Path(__file__).parents[1] / "streaming"))
from toy_streams import blobs, closed, net, run, same, weights


def solved(
    folder: Path, labels: tuple[int, ...] = (2, 0, 1), guard: Guard | None = None, **how: Any
) -> StreamLearner:
    """A learner that has seen some samples, and has saved its state."""
    folder.mkdir(exist_ok=True)
    store = SampleStore(folder / "samples.db", 2**20)
    learner = StreamLearner(
        net(), store, head=ClosedForm(**how), detector="none", state_dir=folder, classes=labels[:1],
        guard=guard,
    )  # fmt: skip
    run(learner, blobs(150, labels))
    learner.save()
    return learner


def sums_of(folder: Path, server: nn.Module, **settings: Any) -> HeadSums:
    data, metrics = asked(client_of(folder, **settings), server, SolveHead)
    assert "fl_elastic.error" not in metrics, metrics
    return decode_head_sums(data, Manifest.of(server))


@pytest.fixture
def no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a pass over all samples")

    monkeypatch.setattr(SavedLearner, "every_sample", refused)


@pytest.mark.usefixtures("no_pass")
@pytest.mark.parametrize("later", [False, True])
def test_its_sums_are_those_of_its_samples_in_the_servers_order(
    tmp_path: Path, later: bool
) -> None:
    learner, server = solved(tmp_path), net()
    rows = learner.store.take(sorted(learner.store.draw(1000).tolist()))
    if later:
        # Not saved yet, and not in the sums that are sent.
        ids = [learner.observe(x).sample_id for x, _ in blobs(5, seed=4)]
        learner.label(ids[0] or 0, 1)
    data = [(torch.from_numpy(rows.x), torch.from_numpy(rows.y))]
    expected = head_sums(nn.Sequential(server[5]), data)  # type: ignore[index]
    found = sums_of(tmp_path, server)
    assert found.weight == "5.weight" and found.num_examples == expected.num_examples == len(rows)
    for name in ("products", "targets", "squares"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    heads = [closed_form_head(each) for each in (found, expected)]
    assert heads[0].penalty == pytest.approx(heads[1].penalty, rel=10.1)
    same = closed_form_head(found.without_folds()), closed_form_head(expected.without_folds())
    assert np.abs(same[0].weight - same[1].weight).max() <= 1e-4 * np.abs(same[1].weight).max()
    assert len(found.folds) == 5 and not expected.num_examples % 1
    closed(learner)


@pytest.mark.usefixtures("no_pass")
def test_what_the_learner_has_forgotten_is_in_no_sums(tmp_path: Path) -> None:
    learner, server = solved(tmp_path), net()
    gone = sorted(learner.store.draw(1000).tolist())[10:40]
    assert learner.forget(gone).exact
    rows = learner.store.take(sorted(learner.store.draw(1000).tolist()))
    data = [(torch.from_numpy(rows.x), torch.from_numpy(rows.y))]
    expected = head_sums(nn.Sequential(server[5]), data)  # type: ignore[index]
    found = sums_of(tmp_path, server)
    assert found.num_examples == len(rows) and not {*rows.ids.tolist()} & {*gone}
    for name in ("products", "targets", "squares"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    with pytest.raises(StreamError, match=r"StreamLearner\.forget"):
        client_of(tmp_path).forget(gone)
    closed(learner)


@pytest.mark.usefixtures("no_pass")
def test_older_samples_count_less_on_the_way_as_well(tmp_path: Path) -> None:
    learner = solved(tmp_path, remember=30)
    found = sums_of(tmp_path, net())
    assert 25 <= found.num_examples <= 31 and not found.folds
    assert np.isfinite(closed_form_head(found).weight).all()
    closed(learner)


@pytest.mark.usefixtures("no_pass")
def test_labels_that_it_has_not_met_are_empty_columns(tmp_path: Path) -> None:
    learner = solved(tmp_path, labels=(0, 2))
    found = sums_of(tmp_path, net())
    assert found.targets.shape == (17, 3) and not found.targets[:, 1].any()
    fewer = sums_of(tmp_path, net(), classes=[2, 0])
    assert np.allclose(fewer.targets[:, 0], found.targets[:, 2]) and not fewer.targets[:, 2].any()
    closed(learner)


def test_of_other_labels_it_sends_what_a_pass_gives(tmp_path: Path) -> None:
    learner = solved(tmp_path, labels=(0, 1, 2, 7))
    stored = learner.store.classes
    found = sums_of(tmp_path, net())
    assert found.num_examples == sum(stored[label] for label in (0, 1, 2))
    closed(learner)


def test_training_that_would_change_its_features_is_refused(tmp_path: Path) -> None:
    learner = solved(tmp_path)
    assert "keeps features at '5'" in refusal(client_of(tmp_path, budget=Budget()), net())
    other = net(seed=5)
    assert "differs from the learner's below '5'" in refusal(
        client_of(tmp_path), other, kind=SolveHead
    )
    closed(learner)


def test_a_federation_is_solved_from_its_sums_and_goes_on_above_its_features(
    tmp_path: Path,
) -> None:
    server = net()
    learners = [solved(tmp_path / str(node), labels) for node, labels in ((1, (2, 0)), (2, (1,)))]
    before = [weights(each) for each in learners]
    apps = {
        node: elastic_client_app(lambda _, n=node: client_of(tmp_path / str(n))) for node in (1, 2)
    }
    records: list[Any] = []
    terms = RoundConfig(cut="fixed:5", read="last")
    strategy = PartialUpdates(quiet(nodes=2), config=terms, on_round=records.append)
    result, _ = run_rounds(strategy, apps, arrays_of(server), 1)
    assert [len(each.accepted) for each in records] == [2] * len(records) and len(records) == 3
    load_weights(server, Manifest.of(server), as_weights(result.arrays))
    x, y = zip(*blobs(100, seed=9), strict=True)
    data = [(torch.from_numpy(np.stack(x)), torch.tensor(y))]
    # No device has seen all classes.
    accuracy = evaluate(server, torch.nn.functional.cross_entropy, data).accuracy
    assert accuracy is not None and accuracy > 0.9
    for learner, own in zip(learners, before, strict=True):
        assert learner.apply_round_result() and same(weights(learner), own)
        closed(learner)


def test_it_keeps_its_model_and_says_so_where_the_server_would_read_elsewhere(
    tmp_path: Path,
) -> None:
    solved(tmp_path / "stream")
    for task in (RankPlaces(examples=8), SolveHead(read="0@flat")):
        config = {PACKED: True, **task.to_config()}
        metrics = client_of(tmp_path / "stream").fit(packed(net()), config)[2]
        assert "keeps the model" in str(metrics["fl_elastic.error"])


def test_asked_for_noise_it_sends_no_exact_sums(tmp_path: Path) -> None:
    solved(tmp_path)
    server = net()
    first, second = (
        decode_noisy_sums(
            asked(client_of(tmp_path), server, SolveHead, clip=1.0, noise=2.0)[0],
            Manifest.of(server),
            2.0,
        )
        for _ in range(2)
    )
    assert first.weight == second.weight == "5.weight"
    assert np.abs(first.products - second.products).max() > 1.0


def test_beside_sums_with_noise_no_count_is_exact(tmp_path: Path) -> None:
    learner, server = solved(tmp_path), net()
    plain, noisy = (
        client_of(tmp_path).fit(packed(server), {PACKED: True, **SolveHead(**told).to_config()})
        for told in ({}, {"clip": 1.0, "noise": 2.0})
    )
    assert plain[2]["labelled-since-round"] == learner.progress.labelled == 150
    assert noisy[1] == 1 and "fl_elastic.error" not in noisy[2]
    assert not {*plain[2].values()} & {150} & {*noisy[2].values()}
    assert not [name for name in noisy[2] if "since-round" in name or "store" in name]
    closed(learner)


@pytest.mark.usefixtures("no_pass")
def test_its_folds_are_of_samples_that_are_in_its_sums(tmp_path: Path) -> None:
    learner, server = solved(tmp_path, guard=Guard(every=10, size=4)), net()
    kept = load_snapshot(tmp_path, net(), classification_loss, prepare=as_floats)
    kept.store.close()
    rows = learner.store.take(sorted(learner.store.draw(1000).tolist()))
    learned = dict(zip(rows.ids.tolist(), rows.y.tolist(), strict=True))
    # None of this is in the saved state, and all of it is in the store.
    relabelled = sorted(learned)[:60]
    for number in relabelled:
        learner.label(number, 2 if learned[number] != 2 else 0)
    run(learner, blobs(90, seed=5))
    assert {row.number for row in kept.held_out} < {*learner.store.draw(1000).tolist()}
    found = sums_of(tmp_path, server)
    assert found.num_examples == len(learned) and len(found.folds) == 5
    unchanged = [y for number, y in learned.items() if number not in relabelled]
    counted = sum((fold.rows.T @ fold.targets)[-1] for fold in found.folds)
    assert counted == pytest.approx(np.bincount(unchanged, minlength=3))
    closed(learner)
