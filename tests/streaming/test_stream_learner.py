"""The loop: test first, then store, then maybe train; drifts, late labels, new classes, bad samples, the guard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_ones import slow_unless
from torch import nn
from toy_streams import CENTRES, adam, blobs, closed, learner_in, net, run, same, weights

from fl_elastic.budget import Budget
from fl_elastic.errors import ElasticError, ModelError, StreamError, TrainingError
from fl_elastic.streaming import (
    DriftDetector,
    Guard,
    SampleStore,
    StreamLearner,
    StreamOptions,
    Trigger,
)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    learners: list[StreamLearner] = []

    def make(*arguments: Any, **settings: Any) -> StreamLearner:
        folder = tmp_path / str(len(learners))
        folder.mkdir(exist_ok=True)
        learners.append(learner_in(folder, *arguments, **settings))
        return learners[-1]

    yield make
    for learner in learners:
        closed(learner)


class AlarmAt(DriftDetector):
    """Says drift at one error only."""

    def __init__(self, number: int) -> None:
        self.left = number

    def update(self, error: float) -> bool:
        self.left -= 1
        return self.left == 0


def test_it_learns(made: Any) -> None:
    learner = made()
    seen = run(learner, blobs(300))
    assert np.mean([each.correct for each in seen[:50]]) < 0.7
    assert np.mean([each.correct for each in seen[-100:]]) > 0.9
    assert [i + 1 for i, each in enumerate(seen) if each.adapted] == [50, 100, 150, 200, 250, 300]
    progress = learner.progress
    assert progress.observed == progress.labelled == 300 and progress.adaptations == 6
    assert progress.right == sum(each.correct for each in seen) and progress.accuracy > 0.85
    assert [each.at for each in learner.adaptations] == [50, 100, 150, 200, 250, 300]
    assert all(each.steps == 10 and not each.undone for each in learner.adaptations)
    assert learner.adaptations[0].trained == ("5", "3", "0")


def test_a_sample_is_predicted_before_anything_is_learned_of_it(made: Any) -> None:
    learner = made(trigger=Trigger(1, None), classes=(0, 1, 2), steps=2)
    for x, y in blobs(20):
        with torch.no_grad():
            expected = int(learner.model(torch.from_numpy(x)[None]).argmax())
        seen = learner.observe(x, y)
        assert seen.prediction == expected and seen.correct == (expected == y) and seen.adapted


def test_only_known_classes_are_predicted(made: Any) -> None:
    learner = made(trigger=Trigger(1000, None))
    assert learner.observe(CENTRES[0], 40).prediction is None
    assert learner.observe(CENTRES[1], 40).prediction == 40
    assert learner.classes == (40,)


@pytest.mark.parametrize("policy", slow_unless("elastic".__eq__, ["full", "elastic"]))
def test_after_a_drift_it_recovers(policy: str, made: Any) -> None:
    learner = made(detector="adwin", policy=policy, budget=Budget(speedup=1.5), steps=20)
    seen = run(learner, blobs(300) + blobs(400, seed=1, turn=1))
    drifts = [i for i, each in enumerate(seen) if each.drift]
    assert drifts and 300 <= drifts[0] < 360
    answered = [each for each in learner.adaptations if each.drift]
    assert answered and answered[0].at >= drifts[0] + 20
    assert np.mean([each.correct for each in seen[300:330]]) < 0.5
    assert np.mean([each.correct for each in seen[-100:]]) > 0.85


def test_a_drift_makes_it_look_anew_at_what_tensors_are_worth(made: Any) -> None:
    learner = made(
        detector=lambda: AlarmAt(120), policy="elastic", budget=Budget(speedup=2), trigger=Trigger(50, None)
    )  # fmt: skip
    stream = blobs(150)
    run(learner, stream[:100])
    assert learner.rule.selection.scores
    run(learner, stream[100:119])
    assert learner.rule.selection.scores and learner._memory.held_out
    assert learner.observe(*stream[119]).drift
    assert not learner.rule.selection.scores and not learner.rule.selection.left_out
    # Those of the old world are no judges of the new one, but may be learned from.
    assert [row.number for row in learner._memory.held_out][1:] == []
    run(learner, stream[120:])
    assert learner.rule.selection.scores and learner.adaptations[-1].drift


def test_held_out_samples_are_not_trained_on(made: Any) -> None:
    learner = made(guard=Guard(every=4, size=5), trigger=Trigger(10_000, None))
    stream = blobs(40)
    seen = run(learner, stream)
    assert [each.sample_id for each in seen] == list(range(1, 41))
    held = list(range(4, 41, 4))
    window = {row.number for row in learner._memory.held_out}
    assert window == set(held[-5:])
    stored = learner.store.ids().tolist()
    pool = learner._memory.pool(learner._classifier.classes)
    assert pool is not None and not window & set(stored)
    assert sorted(stored) == sorted(set(range(1, 41)) - window)
    for number in window:
        assert not (pool.x == stream[number - 1][0]).all(1).any()


def test_a_label_may_come_after_its_sample_has_left_the_store(made: Any) -> None:
    learner = made(capacity=2**17, trigger=Trigger(10**6, None))
    ids = [learner.observe(x).sample_id for x, _ in blobs(700)]
    assert len(learner.store) < 700 and None not in ids and len(set(ids)) == 700
    for each in ids:
        assert learner.label(each, 1).correct is not None
    assert learner.progress.labelled == 700


class Broken:
    """Nothing that numpy could read."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ValueError("no")


def test_bad_samples_are_counted_and_the_stream_goes_on(made: Any) -> None:
    learner = made()
    good = blobs(60)
    run(learner, good[:10])
    bad: list[tuple[Any, Any]] = [
        (np.full(6, np.nan), 0), (np.zeros(5, np.float32), 0), (np.zeros((6, 1)), 0), ("six", 0),
        (None, 0), (Broken(), 0), (np.full(6, 1e300), 0), (good[0][0] + 1j, 0),
        (good[0][0], -(2**40)), (good[0][0], 0.5), (good[0][0], "cat"), (good[0][0], 2**40),
        (good[0][0], math.nan),
    ]  # fmt: skip
    for x, y in bad:
        seen = learner.observe(x, y)
        assert seen.refused and seen.sample_id is None and seen.prediction is None
    assert sum(learner.progress.rejected.values()) == len(bad)
    assert learner.progress.observed == 10 and len(learner.store) == 9
    assert learner.store.rejected == {}
    seen = run(learner, good[10:])
    assert sum(each.adapted for each in seen) == 1 and learner.progress.observed == 60


def test_the_first_sample_may_be_bad(made: Any) -> None:
    learner = made()
    assert "does not take it" in learner.observe(np.zeros(9, np.float32), 0).refused
    assert learner.observe(np.zeros(6, np.float32), 0).refused == ""


@pytest.mark.parametrize("kind", [np.uint8, np.bool_, np.int64])
def test_whole_numbers_for_a_model_of_floats_are_refused_with_what_to_do(
    made: Any, kind: Any
) -> None:
    learner = made()
    refused = learner.observe(np.ones(6, kind), 0).refused
    assert refused == (
        f"the model does not take it: it takes float32, and the sample is {np.dtype(kind)}: convert samples, "
        "or give prepare="
    )
    assert learner.observe(np.ones(6, np.float32), 0).refused == ""


def test_reasons_do_not_grow_for_ever(made: Any) -> None:
    learner = made()
    learner.observe(np.zeros(6, np.float32), 0)
    for length in range(100, 300):
        learner.observe(np.zeros(length, np.float32), 0)
    rejected = learner.progress.rejected
    assert sum(rejected.values()) == 200 and len(rejected) <= 51 and rejected["other"] > 100


def test_new_classes_get_outputs_in_the_order_of_their_appearance(made: Any) -> None:
    learner = made(model=net(outputs=2), steps=20)
    seen = run(learner, blobs(100, [4, 1]) + blobs(200, [6, 4, 1, 0], seed=1))
    first = blobs(100, [4, 1])[0][1]
    assert learner.classes[:2] == ((4, 1) if first == 4 else (1, 4))
    assert set(learner.classes) == {4, 1, 6, 0}
    head = learner.model.get_submodule("5")
    assert isinstance(head, nn.Linear) and head.out_features == 4
    assert np.mean([each.correct for each in seen[-60:]]) > 0.7


def test_nonsense_labels_do_not_grow_the_head_for_ever(made: Any) -> None:
    learner = made(most_classes=5, trigger=Trigger(10**6, None))
    for label in range(40):
        learner.observe(CENTRES[0], label)
    assert learner.classes == (0, 1, 2, 3, 4)
    assert learner.progress.rejected == {"a label beyond 5 classes": 35}


def test_a_head_that_cannot_grow_refuses_new_labels_alone(made: Any) -> None:
    class NoHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    learner = made(model=NoHead())
    seen = run(learner, blobs(120))
    assert len(learner.classes) == 2 and sum(bool(each.refused) for each in seen) > 20
    assert learner.progress.adaptations >= 1
    assert "no output for another class" in next(iter(learner.progress.rejected))


def test_a_loss_with_a_weight_for_each_class_refuses_new_labels_alone(made: Any) -> None:
    learner = made(net(2), loss_fn=nn.CrossEntropyLoss(torch.ones(2)))
    seen = run(learner, blobs(120))
    assert len(learner.classes) == 2 and sum(bool(each.refused) for each in seen) > 20
    assert learner.progress.adaptations >= 1
    assert "the loss refuses it" in next(iter(learner.progress.rejected))


def test_a_loss_with_weights_for_other_classes_is_explained(made: Any) -> None:
    learner = made(loss_fn=nn.CrossEntropyLoss(torch.ones(5)))
    with pytest.raises(TrainingError, match="weight tensor of shape"):
        run(learner, blobs(120, (0, 1)))


def test_what_makes_things_worse_is_put_back(made: Any) -> None:
    rate: dict[str, Any] = {"lr": 0.1}
    learner = made(
        optimizer_fn=lambda p: torch.optim.SGD(p, **rate), policy="elastic",
        budget=Budget(speedup=1.5), guard=Guard(every=3, size=16), steps=20,
    )  # fmt: skip
    stream = blobs(200)
    run(learner, stream[:100])
    assert learner.progress.rolled_back == 0
    before, selection = weights(learner), deepcopy(learner.rule.selection)
    rate["maximize"] = True
    seen = run(learner, stream[100:150])
    assert seen[-1].rolled_back and not seen[-1].adapted
    assert same(before, weights(learner)) and learner.rule.selection == selection
    assert learner.progress.rolled_back == 1 and "held-out" in learner.adaptations[-1].undone
    rate["maximize"] = False
    seen = run(learner, stream[150:])
    assert seen[-1].adapted and not same(before, weights(learner))


@pytest.mark.parametrize("rate", [1e30, math.nan])
def test_numbers_that_are_not_finite_are_put_back(rate: float, made: Any) -> None:
    def wild(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.param_groups[0]["lr"] = rate
        return optimizer

    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    learner = made(model=model, optimizer_fn=wild, guard=Guard(every=1000), steps=1)
    before = weights(learner)
    seen = run(learner, blobs(60))
    assert seen[49].rolled_back and same(before, weights(learner))
    assert all(each.prediction is not None for each in seen[1:]) and not learner.model.training


def test_asked_to_adapt_before_the_first_sample(made: Any) -> None:
    learner = made()
    assert learner.adapt() is None and not learner.tick().adapted
    learner.observe(CENTRES[0])
    assert learner.adapt() is None and learner.progress.adaptations == 0


def test_a_model_without_class_scores_is_an_error(made: Any) -> None:
    learner = made(model=nn.Sequential(nn.Linear(6, 3), nn.Flatten(0)))
    with pytest.raises(Exception, match="class scores"):
        learner.observe(CENTRES[0], 0)


def test_settings_that_mean_nothing(made: Any) -> None:
    for settings in ({"steps": 0}, {"history": 0}, {"save_every": -1}, {"most_classes": 0}):
        with pytest.raises(StreamError):
            StreamOptions(**settings)  # type: ignore[arg-type]
    for wrong in ({"detector": "adwinn"}, {"classes": (1, 1)}):
        with pytest.raises((StreamError, ValueError)):
            made(**wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"policy": "nope"}, "unknown policy 'nope'"),
        ({"trigger": 5}, "trigger 5 is no Trigger"),
        ({"replay": 5}, "replay 5 is no Replay"),
        ({"guard": Guard}, "is no Guard"),
        ({"latent": 2}, "latent 2 is no Latent"),
        ({"seed": "x"}, "seed 'x' is no whole number"),
        ({"classes": ["a", "b"]}, "the label 'a' is not a class number"),
        ({"classes": [1.5]}, "the label 1.5 is not a class number"),
    ],
)
def test_a_setting_of_another_kind_is_refused_at_once(
    wrong: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with (
        SampleStore(tmp_path / "samples.db", 2**18) as store,
        pytest.raises(ElasticError, match=why),
    ):
        StreamLearner(net(), store, optimizer_fn=adam, state_dir=tmp_path, **wrong)


def test_a_loss_that_is_no_number_is_said_to_be_none(made: Any) -> None:
    learner = made(loss_fn=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ModelError, match="loss_fn must return one number"):
        run(learner, blobs(200))


def test_drift_waits_for_samples_of_the_new_world(made: Any) -> None:
    learner = made(detector=lambda: AlarmAt(10), trigger=Trigger(None, 7), optimizer_fn=adam)
    seen = run(learner, blobs(30))
    assert [i for i, each in enumerate(seen) if each.drift] == [9, 19, 29]
    assert [i for i, each in enumerate(seen) if each.adapted] == [16, 26]


def test_one_who_interrupts_leaves_no_half_adaptation(made: Any) -> None:
    class Interrupted(torch.optim.SGD):
        left = 3

        def step(self, closure: Any = None) -> Any:
            Interrupted.left -= 1
            if Interrupted.left == 0:
                raise KeyboardInterrupt
            return super().step(closure)

    learner = made(optimizer_fn=lambda p: Interrupted(p, lr=0.1))
    before = weights(learner)
    with pytest.raises(KeyboardInterrupt):
        run(learner, blobs(60))
    assert Interrupted.left == 0 and same(before, weights(learner)) and not learner.model.training
    assert run(learner, blobs(5, seed=1))[0].adapted, "it is still due"
