"""Training on features of the frozen prefix is training, only cheaper."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import assert_weights
from small_models import Chosen, chain, conv_net, images, loss_fn, sgd, vectors, weights_of
from torch import nn
from trainer_settings import free_probes, state_with

from fl_elastic.budget import Budget
from fl_elastic.errors import SettingError, TrainingError
from fl_elastic.profiling import profile_model
from fl_elastic.profiling.prefix import StoreTerms, elastic_forward
from fl_elastic.state.rows import room_of
from fl_elastic.training import ElasticTrainer, ForwardOptions, Timing, TrainerOptions
from fl_elastic.training.elastic_forward import ElasticForward


def trainer_of(model: nn.Module, names: set[str], forward: ForwardOptions | None) -> ElasticTrainer:
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(),
        options=TrainerOptions(forward=forward, timing=Timing(closed_loop=False, clock="cpu")),
    )  # fmt: skip
    trainer.planner.policy = Chosen(names)
    return trainer


def settled_net() -> nn.Module:
    """A net whose norms have seen data, so that folding has something to fold."""
    model = conv_net().train()
    for inputs, _ in images(8, seed=5):
        model(inputs)
    return model


OPTIONS = {
    "inference": ForwardOptions(),
    "memory": ForwardOptions(feature_bytes=1 << 20, precision="fp32"),
    "small": ForwardOptions(feature_bytes=5 * room_of(1 + 8 * 64 * 4, 2**14), precision="fp32"),
    "fp16": ForwardOptions(feature_bytes=1 << 20),
    "int8": ForwardOptions(feature_bytes=1 << 20, precision="int8"),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_weights_end_where_plain_training_ends(kind: str) -> None:
    start = settled_net()
    batches = images(3)
    plain = trainer_of(copy.deepcopy(start), {"11", "6"}, None)
    plain.fit(batches, epochs=3)
    elastic = trainer_of(copy.deepcopy(start), {"11", "6"}, OPTIONS[kind])
    report = elastic.fit(batches, epochs=3)
    assert report.forward is not None and report.forward.refused == ""
    assert report.forward.cut == "5"
    if kind == "inference":
        assert (report.forward.computed, report.forward.found) == (54, 0)
    elif kind == "small":
        # Five rows fit; the other thirteen examples are computed in each of three epochs.
        assert report.forward.feature_bytes <= OPTIONS[kind].feature_bytes
        assert (report.forward.computed, report.forward.found) == (18 + 2 * 13, 2 * 5)
    else:
        assert (report.forward.computed, report.forward.found) == (18, 36)
    tolerance = 0.02 if kind == "int8" else 2e-3 if kind == "fp16" else 1e-4
    expected = weights_of(plain.model)
    for name, value in weights_of(elastic.model).items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
    assert set(elastic.update().deltas) == set(plain.update().deltas)


class Noisy:
    """Images that are never twice the same."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([(x + torch.randn_like(x), y) for x, y in images(3)])


def test_kept_features_are_let_go_after_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[ElasticForward]] = []

    class Noted(ElasticForward):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(weakref.ref(self))

    monkeypatch.setattr("fl_elastic.training.elastic_forward.ElasticForward", Noted)
    trainer = trainer_of(settled_net(), {"11"}, ForwardOptions(feature_bytes=10**7))
    report = trainer.fit(images(4), epochs=2)
    assert report.forward is not None and report.forward.found
    gc.collect()
    assert [each() for each in made] == [None]


def test_random_augmentation_is_refused_with_a_way_out() -> None:
    forward = ForwardOptions(feature_bytes=1 << 20)
    report = trainer_of(settled_net(), {"11"}, forward).fit(Noisy(), epochs=4)
    assert report.forward is not None
    assert "no example came back unchanged" in report.forward.refused
    assert "without random augmentation" in report.forward.refused
    assert report.steps == 12 and report.forward.found == 0


@pytest.mark.parametrize("feature_bytes", [1, 100])
def test_a_cache_too_small_for_one_example_is_refused_and_training_goes_on(
    feature_bytes: int,
) -> None:
    report = trainer_of(settled_net(), {"6"}, ForwardOptions(feature_bytes=feature_bytes)).fit(
        images(2), epochs=2
    )
    assert report.forward is not None and report.steps == 4
    assert "allow at least" in report.forward.refused
    with pytest.raises(SettingError):
        ForwardOptions(feature_bytes=-1)


def test_a_model_that_cannot_be_split_trains_as_ever() -> None:
    class Secretive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            out: torch.Tensor = self.last(self.second(y)) * y.detach().mean()
            return out

    report = trainer_of(Secretive(), {"last"}, ForwardOptions()).fit(vectors(3))
    assert report.forward is not None and "other outputs" in report.forward.refused
    assert report.steps == 3


class ReshapedByHand(nn.Module):
    """Knows how large a batch is, below a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.convolution = nn.Linear(16, 16), nn.Conv1d(1, 4, 3, padding=1)
        self.head = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        folded = torch.relu(self.below(x)).view(8, 1, 16)
        found: torch.Tensor = self.head(torch.relu(self.convolution(folded)).flatten(1))
        return found


def without_statistics() -> nn.Module:
    norm = nn.BatchNorm1d(16, track_running_stats=False)
    return nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


class TimeFirst(nn.Module):
    """Takes 8 sequences of 5 steps as (5, 8, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.recurrent, self.head = nn.Linear(16, 16), nn.GRU(16, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.recurrent(torch.relu(self.below(x)))[0][-1])
        return found


@pytest.mark.parametrize("make", [ReshapedByHand, without_statistics, TimeFirst])
@pytest.mark.parametrize("forward", [ForwardOptions(), ForwardOptions(feature_bytes=1 << 20)])
def test_what_cannot_run_on_a_part_of_a_batch_trains_as_ever(
    make: Any, forward: ForwardOptions
) -> None:
    start = make()
    shape = (5, 8, 16) if make is TimeFirst else (8, 16)
    batches = [(torch.randn(shape), torch.randint(2, (8,))) for _ in range(3)]
    names = {list(dict(start.named_modules()))[-1]}
    plain, kept = copy.deepcopy(start), copy.deepcopy(start)
    trainer_of(plain, names, None).fit(batches, epochs=2)
    report = trainer_of(kept, names, forward).fit(batches, epochs=2)
    assert_weights(kept, plain)
    assert report.forward is not None and report.steps == 6
    assert report.forward.feature_bytes == 0
    assert report.forward.refused or not forward.feature_bytes


def test_a_plan_without_a_frozen_prefix_is_left_alone() -> None:
    report = trainer_of(chain(), {"0"}, ForwardOptions(feature_bytes=1 << 20)).fit(
        vectors(3), epochs=2
    )
    assert report.forward is not None
    assert (report.forward.cut, report.forward.computed, report.forward.refused) == ("", 0, "")


def test_a_cache_makes_shallow_steps_cheaper_the_longer_it_is_used() -> None:
    profile = profile_model(settled_net(), loss_fn, images()[0], optimizer_fn=sgd, clock="cpu")
    plain = profile.forward_seconds
    inference = elastic_forward(profile).forward_seconds
    few = elastic_forward(profile, StoreTerms(1 << 30, 2, 18, 2)).forward_seconds
    many = elastic_forward(profile, StoreTerms(1 << 30, 2, 18, 50)).forward_seconds
    nothing = elastic_forward(profile, StoreTerms(1, 2, 18, 50)).forward_seconds
    assert (inference <= plain + 1e-12).all() and inference[-1] == plain[-1]
    assert (few <= inference + 1e-12).all() and (many <= few + 1e-12).all()
    assert (nothing <= inference + 1e-12).all() and (nothing >= many - 1e-12).all()
    locked = elastic_forward(profile, StoreTerms(1 << 30, 2, 18, 50), at_least=3).forward_seconds
    assert locked[0] >= many[0] and locked[2] == pytest.approx(many[2])


BAD = {
    "another shape": (torch.randn(6, 5, 8, 8), torch.zeros(6, dtype=torch.long)),
    "no pair": torch.randn(6, 3, 8, 8),
    "NaN": (torch.full((6, 3, 8, 8), float("nan")), torch.zeros(6, dtype=torch.long)),
    "unknown class": (torch.randn(6, 3, 8, 8), torch.full((6,), 9)),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("forward", [ForwardOptions(), ForwardOptions(feature_bytes=1 << 20)])
def test_a_bad_batch_is_one_line_and_leaves_the_model_as_it_was(
    kind: str, forward: ForwardOptions
) -> None:
    model = settled_net()
    before = weights_of(model)
    with pytest.raises(TrainingError) as caught:
        trainer_of(model, {"11"}, forward).fit([*images(2), BAD[kind]], epochs=2)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], now) for name, now in weights_of(model).items())
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_shallower_plan_goes_on_with_the_features_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_probes(monkeypatch)
    trainer = trainer_of(settled_net(), {"11", "6"}, ForwardOptions(feature_bytes=1 << 20))
    trainer.state = trainer.planner.state = state_with(probe_every=4, below_cosine=2.0)
    trainer.planner.policy = Chosen({"11", "6"}, {"11"})
    trainer.budget = trainer.planner.budget = Budget(speedup=1.01)
    report = trainer.fit(images(4), epochs=3)
    assert report.forward is not None and len(report.plans) > 1
    # The second plan could be cut behind the pooling; its features would all have to be computed anew.
    assert report.forward.cut == "5" and report.forward.computed == 24


class Partly:
    """Each pass gives the first batches only, of more examples."""

    def __init__(self, batches: list[Any], given: int) -> None:
        self.batches, self.given = batches, given
        self.dataset_size = sum(len(targets) for _, targets in batches)

    def __len__(self) -> int:
        return self.given

    def __iter__(self) -> Any:
        return iter(self.batches[: self.given])


@pytest.mark.parametrize(
    ("loader", "epochs", "left"),
    [
        (Partly(images(3), 1), 3, 18),  # as many meetings as examples, and only six of these
        (images(3), 1, 18),
        (images(3)[:2], 1, 12),
        (images(3)[:2], 2, 12),
        (images(3)[:2] + images(3)[:1], 2, 12),  # six examples are there twice
        (images(3)[:2] + images(3)[:1], 1, 12),
    ],
)
def test_features_go_with_their_examples_and_not_before(
    tmp_path: Path, loader: Any, epochs: int, left: int
) -> None:
    forward = ForwardOptions(feature_bytes=1 << 20, path=tmp_path / "features.db")
    start = settled_net()
    trainer_of(copy.deepcopy(start), {"11"}, forward).fit(images(3))
    trainer_of(copy.deepcopy(start), {"11"}, forward).fit(loader, epochs=epochs)
    again = trainer_of(copy.deepcopy(start), {"11"}, forward).fit(images(3)).forward
    assert again is not None and (again.found, again.computed) == (left, 18 - left)


class MeanOfSteps(nn.Module):
    """Divides by the number of time steps that a layer below the cut puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.above, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.below(x)
        count = steps.shape[1]
        scores: torch.Tensor = self.head(self.above(self.norm(steps).relu()).relu().sum(1) / count)
        return scores


@pytest.mark.parametrize("kind", ["inference", "memory"])
def test_batches_of_another_length_see_their_own_length_above_the_cut(kind: str) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(6, t, 5), torch.randint(0, 3, (6,))) for t in (12, 20, 7, 12)]
    start = MeanOfSteps()
    plain = trainer_of(copy.deepcopy(start), {"above", "head"}, None)
    plain.fit(batches, epochs=2)
    elastic = trainer_of(copy.deepcopy(start), {"above", "head"}, OPTIONS[kind])
    report = elastic.fit(batches, epochs=2)
    assert report.forward is not None and report.forward.refused == ""
    assert report.forward.computed + report.forward.found == 48
    assert report.forward.found == (0 if kind == "inference" else 12)
    assert_weights(elastic.model, dict(plain.model.state_dict()), rtol=1e-4, atol=1e-6)


class TimeFirstInside(nn.Module):
    """Has time steps before examples inside, and reads their number off a layer below the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.above, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.below(x.transpose(0, 1))
        count = steps.shape[1]
        found = self.above(self.norm(steps).relu()).relu().sum(0)
        scores: torch.Tensor = self.head(found.reshape(count, -1))
        return scores


def test_a_smaller_last_batch_is_trained_where_time_comes_first_inside() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(n, 6, 5), torch.randint(0, 3, (n,))) for n in (8, 8, 5)]
    start = TimeFirstInside()
    plain = trainer_of(copy.deepcopy(start), {"above", "head"}, None)
    plain.fit(batches, epochs=2)
    elastic = trainer_of(copy.deepcopy(start), {"above", "head"}, OPTIONS["inference"])
    report = elastic.fit(batches, epochs=2)
    assert report.forward is not None and report.forward.cut == "above"
    assert_weights(elastic.model, dict(plain.model.state_dict()), rtol=1e-4, atol=1e-6)
