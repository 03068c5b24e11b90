"""A learner whose head is solved from running sums, against least squares over the samples that it has learned."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from slow_ridge import close, slow_ridge
from small_models import conv_net
from test_stream_latent import pictures
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from toy_streams import Sample, adam, blobs, closed, net, run, same, weights

from fl_elastic.errors import ModelError, StoreError, StreamError
from fl_elastic.streaming import ClosedForm, Guard, Latent, SampleStore, StreamLearner
from fl_elastic.streaming.labelled_weights import LabelledWeights
from fl_elastic.streaming.learner_state import StateFolder
from fl_elastic.streaming.round_inbox import RoundChange, RoundInbox, change_between
from fl_elastic.streaming.solved_head import SolvedHead
from fl_elastic.streaming.stream_options import StreamOptions
from fl_elastic.training.head_pass import head_sums

LABELS = range(5)


def table(outputs: int = 1) -> nn.Sequential:
    """A table's rows go into the layer as they are."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, outputs))


def hidden(outputs: int = 1) -> nn.Sequential:
    """A random hidden layer that stays as it is."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, outputs))


def tied() -> nn.Sequential:
    """The last layer has the weight of the one before."""
    layers = nn.Linear(6, 6), nn.Linear(6, 6)
    layers[1].weight = layers[0].weight
    return nn.Sequential(*layers)


def solved_in(
    folder: Path, model: nn.Module | None = None, *, encoding: str = "raw", save_every: int = 0,
    capacity: int = 2**20, head: ClosedForm | None = None, **settings: Any,
) -> StreamLearner:  # fmt: skip
    """A learner with a head in closed form in a folder; its store is closed by `closed`."""
    given: dict[str, Any] = {
        "detector": "none", "guard": Guard(every=10, size=5), "options": StreamOptions(save_every=save_every),
    }  # fmt: skip
    store = SampleStore(folder / "samples.db", capacity, encoding=encoding)
    return StreamLearner(
        model or table(),
        store,
        state_dir=folder,
        head=ClosedForm() if head is None and "optimizer_fn" not in settings else head,
        **{**given, **settings},
    )


def learned(learner: StreamLearner) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Features, outputs and numbers of all labelled samples that are in the store."""
    found = learner.store.take(sorted(learner.store.draw(10**6).tolist()))
    outputs = [learner.classes.index(label) for label in found.y.tolist()]
    return found.x.astype(np.float64), np.array(outputs), found.ids


def solved_of(learner: StreamLearner) -> SolvedHead:
    """The head of a learner that has one in closed form."""
    assert isinstance(learner.rule, SolvedHead)
    return learner.rule


def exact(learner: StreamLearner) -> NDArray[np.float64]:
    """Weight and bias of the head before they are stretched, solved anew."""
    head = solved_of(learner)._head
    head.renew()
    head.layer()
    return np.vstack([head._weight[:-1], head._weight[-1] - head.sums.origin @ head._weight[:-1]])


def is_least_squares(learner: StreamLearner, within: float = 1e-6) -> bool:
    x, y, _ = learned(learner)
    solved = solved_of(learner)
    wanted = slow_ridge(x, y, solved.layer.out_features, solved._head.penalty)
    rows = np.hstack([x, np.ones((len(x), 1))])
    assert round(solved.sums.weight) == len(x)
    return close(rows @ exact(learner), rows @ wanted, within)


def accuracy(learner: StreamLearner, stream: Iterable[Sample]) -> float:
    x, y = zip(*stream, strict=True)
    with torch.no_grad():
        said = learner.model(torch.from_numpy(np.stack(x))).argmax(1).tolist()
    return float(
        np.mean([learner.classes[each] == label for each, label in zip(said, y, strict=True)])
    )


@pytest.mark.parametrize("model", [table, hidden])
@pytest.mark.parametrize("batch", [1, 7])
def test_after_a_stream_the_head_is_that_of_all_its_samples(
    model: Any, batch: int, tmp_path: Path
) -> None:
    learner, stream = solved_in(tmp_path, model()), blobs(300, LABELS)
    for start in range(0, 300, batch):
        x, y = zip(*stream[start : start + batch], strict=True)
        learner.observe_batch(list(x), list(y))
    assert learner.progress.observed == 300 and not learner.progress.rejected
    assert len(learner._memory.held_out) == 5 and len(learner.store) == 295
    assert is_least_squares(learner)
    assert accuracy(learner, blobs(200, LABELS, seed=5)) > 0.9
    assert learner.progress.accuracy > 0.9
    # The penalty is chosen each time there are twice as many.
    assert [each.at for each in learner.adaptations] == sorted({e.at for e in learner.adaptations})
    assert 3 <= len(learner.adaptations) <= 6
    closed(learner)


def test_it_asks_for_no_optimiser_and_takes_no_step(tmp_path: Path) -> None:
    learner = solved_in(tmp_path, net(2))
    below = {name: each for name, each in weights(learner).items() if not name.startswith("5.")}
    seen = run(learner, blobs(60, [0, 1, 2]))
    assert all(np.array_equal(weights(learner)[name], each) for name, each in below.items())
    assert all(each.steps == 0 for each in learner.adaptations)
    assert seen[3].adapted and not seen[3].rolled_back
    assert learner.store.sample(1).x.shape == (1, 16)
    closed(learner)


@pytest.mark.parametrize("classes", [(), (7, 9)])
def test_new_classes_are_new_columns_and_no_order_forgets_one(
    classes: tuple[int, ...], tmp_path: Path
) -> None:
    learner = solved_in(tmp_path, table(max(len(classes), 1)), classes=classes)
    for label in LABELS:
        run(learner, blobs(60, [label], seed=label))
    assert set(learner.classes) == {*LABELS, *classes}
    assert is_least_squares(learner)
    assert min(accuracy(learner, blobs(50, [label], seed=99)) for label in LABELS) > 0.9
    closed(learner)


def test_late_labels_count_and_corrected_ones_move_the_sample(tmp_path: Path) -> None:
    learner, stream = solved_in(tmp_path), blobs(200, LABELS)
    ids = [learner.observe(x).sample_id for x, _ in stream]
    assert not solved_of(learner).sums.weight
    for place, (number, (_, y)) in enumerate(zip(ids, stream, strict=True)):
        assert number is not None
        learner.label(number, (y + 1) % 5 if place % 3 == 0 else y)
    assert is_least_squares(learner)
    held = {row.number for row in learner._memory.held_out}
    for place, (number, (_, y)) in enumerate(zip(ids, stream, strict=True)):
        if place % 3 == 0 and number not in held:
            assert number is not None
            learner.label(number, y)
    assert is_least_squares(learner)
    _, y, numbers = learned(learner)
    right = [stream[number - 1][1] for number in numbers.tolist()]
    assert np.mean([learner.classes[o] == label for o, label in zip(y, right, strict=True)]) == 1
    closed(learner)


@pytest.mark.slow
@pytest.mark.parametrize("remember", [None, 100])
def test_to_forget_is_never_to_have_seen(remember: float | None, tmp_path: Path) -> None:
    how = ClosedForm(remember)
    learner, never = solved_in(tmp_path / "a", head=how), solved_in(tmp_path / "b", head=how)
    stream = blobs(300, LABELS)
    # Two tens, so that the same samples are held out of what remains.
    gone = [*range(40, 50), *range(120, 130)]
    ids = [each.sample_id for each in run(learner, stream)]
    for place, (x, y) in enumerate(stream):
        if remember and place in gone:
            # What it counts depends on its place in the stream.
            never._memory.number += 1
        if place not in gone:
            never.observe(x, y)
    came = learner.forget([ids[place] or 0 for place in gone])
    assert came.exact and not came.changed_nothing and came.examples == came.deleted == 20
    assert remember or is_least_squares(learner)
    never.adapt()
    assert solved_of(learner)._head.penalty == solved_of(never)._head.penalty
    assert len(learner._memory.held_out) == len(never._memory.held_out) == 5
    assert close(exact(learner), exact(never), 1e-5 / 100)
    for name, each in weights(learner).items():
        assert np.abs(each - weights(never)[name]).max() <= 1e-5 * np.abs(each).max()
    with pytest.raises(StreamError, match="none of these samples is here"):
        learner.forget([ids[40] or 0])
    closed(learner)
    closed(never)


def test_what_is_subtracted_is_subtracted_once_whenever_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = solved_in(tmp_path)
    ids = [each.sample_id or 0 for each in run(learner, blobs(200, LABELS))]

    def full(*_: Any) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(SampleStore, "erase", full)
        with pytest.raises(StoreError, match="full"):
            learner.forget(ids[:20])
        with pytest.raises(StoreError, match="full"):
            learner.forget(ids[:30])
    # As if it were killed before the store had erased them.
    learner.store.close()
    again = solved_in(tmp_path)
    assert not {*ids[:30]} & {*again.store.draw(1000).tolist()}
    assert is_least_squares(again)
    again.forget(ids[30:40])
    assert is_least_squares(again)
    closed(again)


def test_a_state_that_cannot_be_saved_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = solved_in(tmp_path)
    ids = [each.sample_id or 0 for each in run(learner, blobs(200, LABELS))]
    before = exact(learner)
    with monkeypatch.context() as patched:
        patched.setattr(StateFolder, "save", lambda *_: False)
        with pytest.raises(StreamError, match="Forget the samples again"):
            learner.forget(ids[:20])
    assert is_least_squares(learner) and close(exact(learner), before, 1e-2)
    learner.forget(ids[:20])
    assert is_least_squares(learner)
    closed(learner)


def test_everything_may_be_forgotten(tmp_path: Path) -> None:
    learner = solved_in(tmp_path)
    ids = [each.sample_id or 0 for each in run(learner, blobs(80, LABELS))]
    learner.forget(ids)
    assert solved_of(learner).sums.weight == 0
    assert not weights(learner)["0.weight"].any()
    run(learner, blobs(50, LABELS, seed=1))
    assert is_least_squares(learner)
    closed(learner)


def test_half_precision_is_subtracted_as_it_was_added(tmp_path: Path) -> None:
    learner = solved_in(tmp_path, encoding="fp16")
    ids = [each.sample_id or 0 for each in run(learner, blobs(200, LABELS))]
    assert is_least_squares(learner)
    learner.forget(ids[:100])
    assert is_least_squares(learner)
    closed(learner)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("latent", [None, Latent(1)])
def test_a_model_may_compute_in_another_precision(
    kind: torch.dtype, latent: Latent | None, tmp_path: Path
) -> None:
    learner = solved_in(
        tmp_path, hidden(3).to(kind), prepare=lambda x: x.to(kind), classes=(0, 1, 2),
        **({} if latent is None else {"latent": latent, "optimizer_fn": adam}),
    )  # fmt: skip
    seen = run(learner, blobs(100))
    assert not any(each.refused for each in seen) and learner.progress.accuracy > 0.7
    closed(learner)


@pytest.mark.slow
def test_older_samples_count_less_where_it_is_asked_for(tmp_path: Path) -> None:
    learner = solved_in(tmp_path, head=ClosedForm(remember=20))
    # So many that the unit of the sums is changed.
    run(learner, [*blobs(500, LABELS), *blobs(150, LABELS, seed=1, turn=1)])
    x, y, numbers = learned(learner)
    solved = solved_of(learner)
    assert solved._base > 0
    counts = np.exp((numbers - 650) / 20)
    wanted = slow_ridge(x, y, 5, solved._head.penalty, counts)
    rows = np.hstack([x, np.ones((len(x), 1))])[-150:]
    assert close(rows @ exact(learner), rows @ wanted, 1e-6)
    assert accuracy(learner, blobs(200, LABELS, seed=5, turn=1)) > 0.9
    closed(learner)
    with pytest.raises(StreamError, match="remember=20"):
        solved_in(tmp_path)


def test_what_was_known_before_the_stream_counts(tmp_path: Path) -> None:
    x, y = zip(*blobs(200, [0, 1], seed=3), strict=True)
    home = [(torch.from_numpy(np.stack(x)), torch.tensor(y))]
    before = head_sums(table(2), home)
    learner = solved_in(tmp_path, table(2), head=ClosedForm(before=before), classes=(0, 1))
    assert accuracy(learner, blobs(100, [0, 1], seed=5)) > 0.95
    run(learner, blobs(100, [2, 3]))
    assert round(solved_of(learner).sums.weight) == 295
    assert accuracy(learner, blobs(200, range(4), seed=5)) > 0.95
    expected = weights(learner)
    closed(learner)
    again = solved_in(tmp_path, table(2), head=ClosedForm(before=before), classes=(0, 1))
    assert same(weights(again), expected)
    closed(again)
    with pytest.raises(StreamError, match="began from sums over 200 examples, not 0"):
        solved_in(tmp_path, table(2), classes=(0, 1))
    # Without their labels, the columns would be those of the first labels to come.
    others = (
        (hidden(2), "40 for classes"),
        (table(1), "1 outputs"),
        (table(2), "2 classes, and 0 labels"),
    )
    for model, why in others:
        with pytest.raises(StreamError, match=why):
            solved_in(tmp_path / why, model, head=ClosedForm(before=before))


def test_without_a_state_it_learns_what_the_store_holds(tmp_path: Path) -> None:
    learner = solved_in(tmp_path)
    run(learner, blobs(200, LABELS))
    closed(learner)
    (tmp_path / "learner.state").unlink()
    again = solved_in(tmp_path)
    assert is_least_squares(again) and accuracy(again, blobs(100, LABELS, seed=5)) > 0.9
    closed(again)


def test_a_head_that_is_worse_on_what_is_held_out_is_put_back(tmp_path: Path) -> None:
    learner = solved_in(tmp_path, guard=Guard(every=4, size=16))
    run(learner, blobs(200, LABELS))
    before, stream = weights(learner), blobs(3, LABELS, seed=8)
    # Huge readings with wrong labels, none of which is held out.
    far = [(10_000 * x, y) for x, y in stream]
    seen = learner.observe_batch([x for x, _ in far], [(y + 2) % 5 for _, y in far])
    assert seen[-1].rolled_back and not seen[-1].adapted
    assert same(weights(learner), before) and learner.progress.rolled_back == 1
    closed(learner)


def test_one_wild_reading_does_not_swallow_all_others(tmp_path: Path) -> None:
    learner = solved_in(tmp_path, hidden())
    run(learner, blobs(200, LABELS))
    wild = learner.observe(np.full(6, 1e30, np.float32), 3)
    assert wild.sample_id and not wild.refused
    run(learner, blobs(60, LABELS, seed=1))
    assert accuracy(learner, blobs(200, LABELS, seed=5)) > 0.9
    assert is_least_squares(learner)
    learner.forget([wild.sample_id])
    assert is_least_squares(learner)
    closed(learner)


def test_convolutions_stay_as_they_are(tmp_path: Path) -> None:
    learner = solved_in(tmp_path, conv_net())
    stream = pictures(60, range(3))
    run(learner, stream)
    assert is_least_squares(learner)
    closed(learner)


def test_a_round_is_left_out_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner = solved_in(tmp_path, hidden())
    run(learner, blobs(60, LABELS))
    before = weights(learner)
    here = LabelledWeights.of(learner._classifier)
    change = RoundChange("one", "", change_between(here, here))
    RoundInbox(tmp_path).leave(change)
    assert learner.apply_round_result()
    assert "from this stream's own sums" in caplog.text
    assert same(weights(learner), before) and learner.rounds.undone == 1
    closed(learner)


def computed_bias() -> nn.Module:
    layer = nn.Linear(6, 2)
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return layer


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"head": "closed_form"}, "give ClosedForm"),
        ({"latent": Latent(1)}, "leave latent out"),
        ({"encoding": "int8"}, "raw or fp16"),
        ({"model": nn.Linear(6, 2)}, "no linear layer inside"),
        ({"model": nn.Sequential(nn.Linear(6, 2, bias=False))}, "with a bias"),
        ({"model": tied()}, "tied"),
        ({"model": nn.Sequential(weight_norm(nn.Linear(6, 2)))}, "computed from other parameters"),
        ({"model": nn.Sequential(computed_bias())}, "computed from other parameters"),
        ({"model": nn.Sequential(nn.Linear(6, 2), nn.ReLU())}, "does not"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises((StreamError, ModelError), match=why):
        solved_in(tmp_path, **settings).observe(np.zeros(6, np.float32), 0)
    with pytest.raises(StreamError, match="remember 0"):
        ClosedForm(remember=0)


def test_features_that_are_not_finite_cost_their_sample_alone(tmp_path: Path) -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    learner = solved_in(tmp_path, nn.Sequential(Log(), nn.Linear(6, 2)))
    for number in range(30):
        x = np.full(6, 1.0 + number % 2, np.float32) * (-1 if number == 20 else 1)
        seen = learner.observe(x, number % 2)
        assert bool(seen.refused) == (number == 20)
    assert "not finite" in next(iter(learner.progress.rejected))
    assert np.isfinite(weights(learner)["1.weight"]).all()
    closed(learner)


def test_scores_that_are_changed_in_place_are_not_the_layers(tmp_path: Path) -> None:
    class InUnits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(x)
            return y.mul_(-1.0)

    learner = solved_in(tmp_path, InUnits())
    with pytest.raises(ModelError, match="end the model with a linear layer"):
        learner.observe(np.zeros(4, np.float32), 0)
    learner.store.close()


def test_a_layer_that_does_more_than_multiply_gets_no_head(tmp_path: Path) -> None:
    class Negative(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    learner = solved_in(tmp_path, nn.Sequential(nn.ReLU(), Negative(4, 2)))
    with pytest.raises(ModelError, match="is not its weight times its input"):
        learner.observe(np.ones(4, np.float32), 0)
    learner.store.close()


def test_numbers_that_the_store_cannot_hold_are_refused_and_not_summed_as_others(
    tmp_path: Path,
) -> None:
    learner = solved_in(tmp_path, nn.Sequential(nn.Linear(2, 2)), encoding="fp16")
    stamps = [70_000.0 + 10 * place for place in range(40)]
    seen = [
        learner.observe(np.array([at, 1.0], np.float32), place % 2)
        for place, at in enumerate(stamps)
    ]
    assert {each.refused for each in seen} == {"a number is beyond the range of the encoding fp16"}
    assert learner.observe(np.array([6e4, 1.0], np.float32), 0).refused == ""
    assert solved_of(learner).sums.weight == 1 and learner.progress.observed == 1
    closed(learner)
