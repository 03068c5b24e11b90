"""Fitting: the same as a plain loop when all is trained, fewer steps below the floor, clear errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import (
    Batch,
    Reiterable,
    adam,
    chain,
    conv_net,
    flat_profile,
    images,
    loss_fn,
    same_weights,
    sgd,
    trainer_of,
    vectors,
    weights_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, RegistryError, TrainingError
from fl_elastic.profiling.measure import OptimizerFn
from fl_elastic.testing import Snapshot
from fl_elastic.training import ElasticTrainer, TrainerOptions
from fl_elastic.training import trainer as trainer_module
from fl_elastic.training.batches import first_batches, loader_size


def elastic(model: nn.Module, batch: Batch, budget: Budget, **options: Any) -> ElasticTrainer:
    settings: dict[str, Any] = {"closed_loop": False, "deep_every": 0} | options
    return ElasticTrainer(
        model,
        loss_fn,
        sgd,
        budget=budget,
        profile=flat_profile(model, batch),
        options=TrainerOptions(**settings),
    )


@pytest.mark.parametrize("optimizer_fn", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_training_everything_is_a_plain_loop_bit_for_bit(
    norm: str, optimizer_fn: OptimizerFn
) -> None:
    batches = images(4)
    model = conv_net(norm)
    plain = deepcopy(model)
    optimizer = optimizer_fn(plain.parameters())
    losses = []
    for _ in range(2):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = loss_fn(plain(inputs), targets)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    trainer = ElasticTrainer(model, loss_fn, optimizer_fn, budget=Budget())
    report = trainer.fit(batches, epochs=2)
    assert same_weights(weights_of(plain), model)
    assert list(report.losses) == losses
    assert report.loss == pytest.approx(sum(losses[4:]) / 4)


def test_two_fits_are_one_longer_fit() -> None:
    batches = vectors(3)
    once, twice = chain(), chain()
    twice.load_state_dict(once.state_dict())
    ElasticTrainer(once, loss_fn, sgd, budget=Budget()).fit(batches, epochs=2)
    trainer = ElasticTrainer(twice, loss_fn, sgd, budget=Budget())
    trainer.fit(batches)
    trainer.fit(batches)
    assert same_weights(weights_of(once), twice)


def test_the_report_counts_what_was_done() -> None:
    batches = vectors(5)
    trainer = trainer_of(chain(), batches[0], ["6", "2"])
    report = trainer.fit(batches, epochs=2)
    assert report.plan is trainer.plan and report.plans == ((0, report.plan),)
    assert report.steps == report.requested_steps == len(report.losses) == 10
    assert report.num_examples == 40
    assert report.full_step_seconds == report.plan.full_step_seconds
    assert report.predicted_seconds == pytest.approx(10 * report.plan.predicted_step_seconds)
    assert report.loss == pytest.approx(sum(report.losses[5:]) / 5)
    assert report.seconds > 0 and report.selection_seconds >= 0
    assert 0 < report.step_seconds <= report.seconds
    assert report.step_speedup == pytest.approx(report.full_step_seconds / report.step_seconds)
    assert report.speedup == pytest.approx(10 * report.full_step_seconds / report.seconds)


def test_importance_is_reported_per_group_when_it_was_needed() -> None:
    batches = vectors(4)
    report = elastic(chain(), batches[0], Budget(speedup=1.5)).fit(batches)
    assert list(report.importance) == ["6", "4", "2", "0"]
    assert max(map(abs, report.importance.values())) == pytest.approx(1.0)
    assert report.plan.mask.sum() < 4 and report.plan.feasible
    probes = 2 * report.full_step_seconds
    steps = 4 * report.plan.predicted_step_seconds
    assert report.predicted_seconds == pytest.approx(steps + probes)


def test_without_a_limit_nothing_is_probed_and_nothing_is_selected_again() -> None:
    batches = vectors(6)
    trainer = elastic(chain(), batches[0], Budget())
    report = trainer.fit(batches)
    assert report.importance == {} and trainer.state.scores == []
    assert report.plans == ((0, report.plan),)
    assert report.plan.mask.all()
    assert report.predicted_seconds == pytest.approx(6 * report.full_step_seconds)


@pytest.mark.parametrize("policy", ["full", "head", "last_k", "bias", "random", "elastic"])
def test_a_speedup_is_met_by_every_policy(policy: str) -> None:
    batches = vectors(20)
    model = chain()
    profile = flat_profile(model, batches[0])
    options = TrainerOptions(closed_loop=False, deep_every=0)
    trainer = ElasticTrainer(
        model,
        loss_fn,
        sgd,
        budget=Budget(speedup=1.5),
        policy=policy,
        profile=profile,
        options=options,
    )
    report = trainer.fit(batches)
    trained = report.steps * report.plan.predicted_step_seconds
    assert 1 <= report.steps <= 20
    assert trained <= 20 * profile.full_step_seconds / 1.5 + 1e-9
    assert report.plan.policy == policy


@pytest.mark.parametrize(
    ("speedup", "steps"), [(1.0, 20), (2.0, 10), (3.0, 6), (19.0, 1), (500.0, 1)]
)
def test_a_budget_below_the_floor_takes_fewer_steps_but_one(speedup: float, steps: int) -> None:
    batches = vectors(20)
    trainer = trainer_of(chain(), batches[0], ["6", "4", "2", "0"], budget=Budget(speedup=speedup))
    report = trainer.fit(batches)
    assert report.steps == steps and report.requested_steps == 20
    assert len(report.losses) == steps
    assert set(trainer.update().steps.values()) == {steps}


def test_a_deadline_counts_the_steps_it_pays_for() -> None:
    batches = vectors(20)
    model = chain()
    full = flat_profile(model, batches[0]).full_step_seconds
    trainer = trainer_of(
        model, batches[0], ["6", "4", "2", "0"], budget=Budget(deadline=7.5 * full)
    )
    assert trainer.fit(batches).steps == 7


class SlowClock:
    """A clock on which each step takes one second, whatever it trains."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return 2 * self.now


def test_a_device_slower_than_its_profile_selects_by_importance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = vectors(60)
    model = chain()
    profile = flat_profile(model, batches[0])
    scale = 0.5 / profile.full_step_seconds
    profile = replace(
        profile,
        node_update_seconds=profile.node_update_seconds * scale,
        node_path_seconds=profile.node_path_seconds * scale,
        forward_seconds=profile.forward_seconds * scale,
    )
    monkeypatch.setattr(trainer_module, "clock_for", lambda *_: SlowClock())
    trainer = ElasticTrainer(
        model,
        loss_fn,
        sgd,
        budget=Budget(deadline=48.0),
        profile=profile,
        options=TrainerOptions(deep_every=0),
    )
    report = trainer.fit(batches)
    # By the profile everything fits; twenty measured steps show that it does not.
    assert report.plans[0][1].mask.all() and report.plans[1][0] == 20
    assert report.importance != {}
    assert report.plan.mask.sum() > 1
    assert report.steps < 60


def test_memory_and_uplink_are_respected_or_refused() -> None:
    batches = images(3)
    model = conv_net()
    profile = flat_profile(model, batches[0])
    uplink = float(profile.parameter_bytes.sum()) / 2
    trainer = elastic(model, batches[0], Budget(uplink=uplink))
    trainer.fit(batches)
    sent = sum(delta.nbytes for n, delta in trainer.update().deltas.items() if "running" not in n)
    assert 0 < sent <= uplink
    before = Snapshot(model)
    with pytest.raises(BudgetError, match="not even the head"):
        elastic(model, batches[0], Budget(memory=10.0)).fit(batches)
    assert before.differences() == []


def loaders() -> dict[str, Callable[[list[Batch]], Iterable[Batch]]]:
    def stacked(batches: list[Batch]) -> TensorDataset:
        return TensorDataset(
            torch.cat([inputs for inputs, _ in batches]), torch.cat([t for _, t in batches])
        )

    class Stream(IterableDataset[Batch]):
        def __init__(self, dataset: TensorDataset) -> None:
            self.dataset = dataset

        def __iter__(self) -> Iterator[Any]:
            return iter([self.dataset[index] for index in range(len(self.dataset))])

    class Sized(Reiterable):
        def __len__(self) -> int:
            return len(self.batches)

    return {
        "list": lambda batches: batches,
        "tuple": tuple,
        "re-iterable without length": Reiterable,
        "re-iterable with length": Sized,
        "data loader": lambda batches: DataLoader(stacked(batches), batch_size=8),
        "data loader of a stream": lambda batches: DataLoader(
            Stream(stacked(batches)), batch_size=8
        ),
    }


@pytest.mark.parametrize("kind", loaders())
@pytest.mark.parametrize("last", [8, 3], ids=["even", "smaller last batch"])
def test_loaders_of_every_kind_train_alike(kind: str, last: int) -> None:
    batches = [*vectors(3), vectors(1, size=last, seed=9)[0]]
    model = chain()
    plain = deepcopy(model)
    report = trainer_of(model, batches[0], ["6", "2"]).fit(loaders()[kind](batches), epochs=2)
    trainer_of(plain, batches[0], ["6", "2"]).fit(batches, epochs=2)
    assert report.steps == report.requested_steps == 8
    assert same_weights(weights_of(plain), model)
    if kind != "re-iterable with length":
        assert report.num_examples == 24 + last


def test_a_loader_may_say_itself_how_many_examples_it_has() -> None:
    class Knowing(Reiterable):
        dataset_size = 17

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Batch]:
            raise AssertionError("read although it says its size")

    assert loader_size(Knowing([]), vectors()[0]) == (2, 17)


def test_first_batches_reads_no_further() -> None:
    read = []

    class Watching(Reiterable):
        def __iter__(self) -> Iterator[Batch]:
            for index, batch in enumerate(self.batches):
                read.append(index)
                yield batch

    assert len(first_batches(Watching(vectors(5)), 2, "cpu")) == 2
    assert read == [0, 1]
    assert len(first_batches(vectors(1), 2, "cpu")) == 1


class NoExamples(Dataset[Any]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


@pytest.mark.parametrize(
    "empty",
    [[], Reiterable([]), DataLoader(NoExamples(), batch_size=2)],
    ids=["list", "none", "torch"],
)
def test_an_empty_loader_is_one_line(empty: Any) -> None:
    with pytest.raises(TrainingError, match="the loader gave no batch") as caught:
        ElasticTrainer(chain(), loss_fn, sgd, budget=Budget()).fit(empty)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_loader_that_can_be_read_only_once_is_one_line(count: int) -> None:
    model = chain()
    before = Snapshot(model)
    with pytest.raises(TrainingError, match="read again") as caught:
        ElasticTrainer(model, loss_fn, sgd, budget=Budget(speedup=1.2)).fit(iter(vectors(count)))
    assert "\n" not in str(caught.value) and before.differences() == []


@pytest.mark.parametrize("epochs", [0, -1])
def test_there_must_be_an_epoch(epochs: int) -> None:
    with pytest.raises(TrainingError, match=f"epochs {epochs}"):
        ElasticTrainer(chain(), loss_fn, sgd, budget=Budget()).fit(vectors(2), epochs=epochs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("broken", [0, 1, 3])
def test_a_batch_without_finite_loss_puts_the_model_back(broken: int, value: float) -> None:
    batches = images(4)
    model = conv_net()
    model[1].eval()
    model[3].bias.requires_grad_(False)
    trainer = elastic(model, batches[0], Budget(speedup=1.2))
    batches[broken] = (torch.full_like(batches[broken][0], value), batches[broken][1])
    before = weights_of(model)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    with pytest.raises(TrainingError) as caught:
        trainer.fit(batches)
    assert "\n" not in str(caught.value) and "NaN" in str(caught.value)
    assert same_weights(before, model)
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    assert modes == [module.training for module in model.modules()]
    assert trainer.update().deltas == {}


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    "bad",
    [
        (torch.randn(8, 5), torch.zeros(8, dtype=torch.long)),
        (torch.randn(8, 6), torch.zeros(7, dtype=torch.long)),
        (torch.randn(8, 6), torch.full((8,), 3)),
        (torch.randn(8, 6),),
        torch.randn(8, 6),
    ],
    ids=["features", "targets", "class", "single", "no pair"],
)
def test_a_batch_that_does_not_fit_is_one_line_and_puts_the_model_back(at: int, bad: Any) -> None:
    batches: list[Any] = vectors(4)
    batches[at] = bad
    model = chain()
    before = weights_of(model)
    with pytest.raises(TrainingError) as caught:
        ElasticTrainer(model, loss_fn, sgd, budget=Budget()).fit(batches)
    assert "\n" not in str(caught.value)
    assert same_weights(before, model)


def test_an_error_of_the_loss_function_leaves_flags_and_modes_as_they_were() -> None:
    batches = images(3)
    model = conv_net()
    calls = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("the user's own")
        return loss_fn(outputs, targets)

    trainer = trainer_of(model, batches[0], ["11"])
    trainer.loss_fn = loss
    with pytest.raises(KeyError, match="own"):
        trainer.fit(batches)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert not any("train" in vars(module) for module in model.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_overflows_makes_no_update(value: float) -> None:
    model = chain()
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="head")
    trainer.fit(vectors(2))
    with torch.no_grad():
        model.get_parameter("6.weight").fill_(value)
    with pytest.raises(TrainingError, match=r"'6.weight' is no longer finite.*learning rate"):
        trainer.update()


def test_parameters_that_were_frozen_by_the_user_stay_out() -> None:
    batches = vectors(3)
    model = chain()
    model[2].requires_grad_(False)
    before = weights_of(model)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget())
    report = trainer.fit(batches)
    assert [group.name for group in report.plan.groups] == ["6", "4", "0"]
    assert same_weights(before, model, ["2.weight", "2.bias"])
    assert not model[2].weight.requires_grad
    assert "2.weight" not in trainer.update().deltas


def test_a_profile_of_another_batch_shape_is_measured_again() -> None:
    model = chain()
    other = flat_profile(model, vectors(size=4)[0])
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), profile=other)
    report = trainer.fit(vectors(2))
    assert trainer.profile is not None and trainer.profile is not other
    assert trainer.profile.key.batch_shape == (8, 6)
    assert report.full_step_seconds == trainer.profile.full_step_seconds
    kept = trainer.profile
    trainer.fit(vectors(2))
    assert trainer.profile is kept


@pytest.mark.parametrize("optimizer_fn", [sgd, adam], ids=["sgd", "adam"])
def test_probing_in_the_midst_of_training_leaves_no_trace(optimizer_fn: OptimizerFn) -> None:
    batches = images(4)
    model = conv_net()
    trainer = ElasticTrainer(model, loss_fn, optimizer_fn, budget=Budget(speedup=1.2))
    trainer.fit(batches)
    assert trainer.optimizer is not None and trainer.optimizer.state
    before = Snapshot(model, trainer.optimizer)
    scores = trainer._importance.score(trainer._probe(batches[:2]))
    assert before.differences() == []
    assert (scores != 0).all()


def test_probes_do_not_change_what_is_trained() -> None:
    batches = vectors(12)
    often, never = chain(), chain()
    never.load_state_dict(often.state_dict())
    half = Budget(speedup=1.2)
    trainer_of(often, batches[0], ["6", "2"], budget=half, reselect_every=2).fit(batches)
    trainer = trainer_of(never, batches[0], ["6", "2"], budget=half)
    trainer._policy.uses_importance = False  # type: ignore[misc]
    trainer.fit(batches)
    assert same_weights(weights_of(often), never)


def test_the_same_seed_trains_the_same() -> None:
    batches = vectors(8)
    start = chain().state_dict()
    results = []
    for _ in range(2):
        model = chain()
        model.load_state_dict(start)
        torch.manual_seed(3)
        trainer = elastic(model, batches[0], Budget(speedup=1.4), reselect_every=2, drift=2.0)
        report = trainer.fit(batches, epochs=2)
        results.append((weights_of(model), [(at, plan.modes) for at, plan in report.plans]))
    assert results[0][1] == results[1][1] and len(results[0][1]) > 2
    assert all(torch.equal(results[0][0][n], results[1][0][n]) for n in results[0][0])


def test_importance_is_probed_again_after_the_gap_and_kept_while_alike() -> None:
    batches = vectors(2) * 10
    model = chain()
    trainer = trainer_of(
        model, batches[0], ["6"], ["4"], budget=Budget(speedup=1.01), reselect_every=4, drift=-2.0
    )
    report = trainer.fit(batches)
    # Probes after 4 and 4 + 8 steps: the cosine is never below -2, so the plan stays and the gap grows.
    assert [at for at, _ in report.plans] == [0, 4, 12]
    assert all(plan is report.plan for _, plan in report.plans)
    trainer = trainer_of(
        model, batches[0], ["6"], ["4"], budget=Budget(speedup=1.01), reselect_every=4, drift=2.0
    )
    report = trainer.fit(batches)
    assert [at for at, _ in report.plans] == [0, 4, 8, 12, 16]
    assert report.plans[0][1].mask.tolist() == [True, False, False, False]
    assert report.plans[1][1].mask.tolist() == [False, True, False, False]


def test_a_group_left_out_is_trained_again() -> None:
    batches = vectors(2)
    model = chain()
    trainer = elastic(model, batches[0], Budget(speedup=1.2), exploration=0.3)
    seen = torch.zeros(4, dtype=torch.bool)
    for _ in range(25):
        seen |= torch.tensor(trainer.fit(batches).plan.mask)
    assert trainer.state.left_out != [0, 0, 0, 0]
    assert seen.all()


def test_deep_fits_train_everything_in_fewer_steps() -> None:
    batches = vectors(12)
    model = chain()
    trainer = elastic(model, batches[0], Budget(speedup=1.5), deep_every=2, exploration=0.0)
    reports = [trainer.fit(batches) for _ in range(20)]
    deep = [report for report in reports if report.plan.mask.all()]
    assert 3 <= len(deep) <= 17
    for report in deep:
        assert report.plans == ((0, report.plan),)
        assert report.steps == 8


def test_unknown_names_are_explained_at_once() -> None:
    with pytest.raises(RegistryError, match="did you mean 'elastic'"):
        ElasticTrainer(chain(), loss_fn, sgd, budget=Budget(), policy="elastc")
    with pytest.raises(RegistryError, match="did you mean 'magnitude'"):
        ElasticTrainer(
            chain(), loss_fn, sgd, budget=Budget(), options=TrainerOptions(importance="magnitud")
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reselect_every": 0}, "reselect_every 0"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"smoothing": -0.1}, "smoothing"),
        ({"smoothing": math.nan}, "smoothing"),
        ({"exploration": -1.0}, "exploration"),
        ({"exploration": math.nan}, "exploration"),
        ({"deep_every": -1}, "deep_every"),
    ],
)
def test_impossible_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        TrainerOptions(**settings)
