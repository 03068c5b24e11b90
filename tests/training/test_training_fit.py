"""Fitting: the same as a plain loop when all is trained, fewer steps below the floor, clear errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from peak_bytes import peak_bytes
from small_models import (
    adam,
    chain,
    conv_net,
    elastic_trainer,
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
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from trainer_settings import free_probes, settings_of, state_with

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, TrainingError
from fl_elastic.groups import Mode
from fl_elastic.groups.mode import sent_bytes
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.profiling import profile_model
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.testing.probes import Snapshot
from fl_elastic.training import (
    ElasticTrainer,
    FitReport,
    SelectionState,
    Timing,
    TrainerOptions,
    evaluate,
)
from fl_elastic.update.partial import trained_part


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


@pytest.mark.parametrize("budget", [Budget(), Budget(speedup=2), Budget(memory=1e6)])
def test_a_trainer_that_is_done_with_holds_no_memory(budget: Budget) -> None:
    # On a device that adapts every minute, weights and optimiser state would wait for Python's collector.
    trainer = ElasticTrainer(chain(), loss_fn, adam, budget=budget)
    trainer.fit(vectors(3))
    trainer.update()
    gone = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert gone() is None
    finally:
        gc.enable()


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
    spent = report.seconds + report.selection_seconds
    assert report.speedup == pytest.approx(10 * report.full_step_seconds / spent)


def test_importance_is_reported_per_group_when_it_was_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_probes(monkeypatch)
    batches = vectors(4)
    report = elastic_trainer(chain(), batches[0], Budget(speedup=1.5)).fit(batches)
    assert list(report.importance) == ["6", "4", "2", "0"]
    assert max(report.importance.values()) > 0
    assert report.plan.mask.sum() < 4 and report.plan.feasible
    probes = 2 * report.full_step_seconds
    steps = 4 * report.plan.predicted_step_seconds
    assert report.predicted_seconds == pytest.approx(steps + probes)


def test_without_a_limit_nothing_is_probed_and_nothing_is_selected_again() -> None:
    batches = vectors(6)
    trainer = elastic_trainer(chain(), batches[0], Budget())
    report = trainer.fit(batches)
    assert report.based_on == "everything fits"
    assert report.plans == ((0, report.plan),)
    assert report.plan.mask.all()
    assert report.predicted_seconds == pytest.approx(6 * report.full_step_seconds)


@pytest.mark.parametrize("policy", ["full", "head", "last_k", "bias", "random", "elastic"])
def test_a_speedup_is_met_by_every_policy(policy: str) -> None:
    batches = vectors(20)
    model = chain()
    profile = flat_profile(model, batches[0])
    options = TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False))
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
    ("speedup", "steps"), [(1.0, 20), (2.0, 10), (3.0, 6), (19.0, 1), (39.0, 1)]
)
def test_a_budget_below_the_floor_takes_fewer_steps_but_one(speedup: float, steps: int) -> None:
    batches = vectors(20)
    trainer = trainer_of(chain(), batches[0], ["6", "4", "2", "0"], budget=Budget(speedup=speedup))
    report = trainer.fit(batches)
    assert report.steps == steps and report.requested_steps == 20
    assert len(report.losses) == steps
    assert set(trainer.update().steps.values()) == {steps}


def within_full_steps(count: float) -> tuple[float, FitReport]:
    """Seconds of a full step, and a fit whose deadline is so many of them."""
    batches, model = vectors(20), chain()
    full = flat_profile(model, batches[0]).full_step_seconds
    budget = Budget(deadline=count * full)
    trainer = trainer_of(model, batches[0], ["6", "4", "2", "0"], budget=budget)
    return full, trainer.fit(batches)


def test_a_deadline_pays_for_the_probe_and_as_many_steps_as_are_left() -> None:
    full, report = within_full_steps(14.5)
    # The importance of the groups was probed on two batches.
    assert report.based_on == "measured importance" and report.steps == 12
    assert report.predicted_seconds == pytest.approx(14 * full)


def test_a_deadline_that_a_probe_would_eat_up_is_spent_on_steps() -> None:
    _, report = within_full_steps(7.5)
    # A probe would have been two steps of the seven.
    assert len(report.plans) == 1 and report.steps == 7


def test_memory_and_uplink_are_respected_or_refused() -> None:
    batches = images(3)
    model = conv_net()
    profile = flat_profile(model, batches[0])
    uplink = float(profile.parameter_bytes.sum()) / 2
    trainer = elastic_trainer(model, batches[0], Budget(uplink=uplink))
    trainer.fit(batches)
    sent = sum(delta.nbytes for delta in trainer.update().deltas.values())
    assert 0 < sent <= uplink
    for parameter in model.parameters():
        parameter.grad = None
    before = Snapshot(model)
    with pytest.raises(BudgetError, match="not even the head"):
        elastic_trainer(model, batches[0], Budget(memory=10.0)).fit(batches)
    assert before.differences() == []


def tied_net() -> nn.Module:
    layers = [nn.Linear(32, 32) for _ in range(3)]
    layers[2].weight = layers[1].weight
    first, second, third = layers
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), first, nn.ReLU(), second, nn.ReLU(), third,
        nn.ReLU(), nn.Linear(32, 3),
    )  # fmt: skip


def normed_net() -> nn.Module:
    blocks = [(nn.Conv2d(width, 16, 1), nn.BatchNorm2d(16), nn.ReLU()) for width in (3, 16, 16, 16)]
    layers = [layer for block in blocks for layer in block]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def freely_normed_net() -> nn.Module:
    layers = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16, affine=False), nn.ReLU(), nn.Flatten()
    return nn.Sequential(
        *layers, nn.Linear(1024, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3)
    )


class Remembering(nn.Module):
    """Keeps its last features, in a buffer that it assigns anew, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 1), parametrizations.spectral_norm(nn.Linear(16, 3))
        self.register_buffer("last", torch.zeros(16))
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.body(x)).mean((2, 3))
        if self.training:
            self.last = y[0].detach().clone()
            self.centre.lerp_(y.detach().mean(0), 0.1)
        out: Tensor = self.head(y - self.centre + 0.1 * self.last)
        return out


@pytest.mark.parametrize("make", [tied_net, normed_net, freely_normed_net, Remembering])
@pytest.mark.parametrize("policy", ["elastic", "last_k", "random"])
def test_an_uplink_is_that_of_all_that_travels(policy: str, make: Callable[[], nn.Module]) -> None:
    """A tied weight travels under each of its names, and a norm's statistics beside its weights."""
    torch.manual_seed(0)
    model, batches = make(), [(torch.randn(8, 3, 8, 8), torch.arange(8) % 3) for _ in range(3)]
    for uplink in (450, 500, 900, 5_000, 9_000):
        trainer = ElasticTrainer(
            deepcopy(model), cross_entropy, sgd, budget=Budget(uplink=uplink), policy=policy
        )
        for _ in range(2):
            trainer.fit(batches)
            sent = sum(delta.nbytes for delta in trainer.update().deltas.values())
            assert 0 < sent <= uplink


class Looking(nn.Module):
    """Looks up words that are scaled down where they are longer than one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(2000, 16, max_norm=1.0), nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(4000))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen[:2000] += torch.bincount(x.flatten(), minlength=2000)
        out: Tensor = self.head(self.words(x).mean(1))
        return out


def test_what_moves_without_being_trained_counts_where_it_travels_and_is_kept(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, batch = Looking(), (torch.randint(0, 2000, (8, 5)), torch.arange(8) % 3)
    trainer = ElasticTrainer(
        model, cross_entropy, sgd, budget=Budget(memory=1e9), policy="head",
        options=TrainerOptions(full_update_every=0),
    )  # fmt: skip
    trainer.fit([batch] * 3)
    assert trainer.plan is not None
    pairs = list(zip(trainer.plan.groups, trainer.plan.modes, strict=True))
    sent = sum(delta.nbytes for delta in trainer.update().deltas.values())
    assert sum(sent_bytes(*each) for each in pairs) == sent == 4 * (2000 * 16 + 4000 + 51)
    # With everything trained as well: the words count once.
    assert sum(sent_bytes(group, Mode.FULL) for group, _ in pairs) == sent
    taken = peak_bytes(lambda: trainer.fit([batch] * 3), tmp_path)
    assert taken <= 1.1 * trainer.plan.predicted_step_bytes


def test_what_an_optimiser_holds_from_earlier_fits_is_part_of_a_memory_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(120, 120), nn.ReLU())]
    model, batch = (
        nn.Sequential(*layers, nn.Linear(120, 3)),
        (torch.randn(4, 120), torch.arange(4) % 3),
    )
    profile = profile_model(model, cross_entropy, batch, optimizer_fn=torch.optim.Adam)
    memory = 0.6 * mask_bytes(profile, np.ones(len(profile), dtype=bool))
    trainer = ElasticTrainer(
        model, cross_entropy, torch.optim.Adam, budget=Budget(memory=memory), policy="random",
        profile=profile,
    )  # fmt: skip
    trained = set[str]()
    for _ in range(6):
        taken = peak_bytes(lambda: trainer.fit([batch] * 3), tmp_path)
        assert trainer.plan is not None and trainer.optimizer is not None
        trained |= set(trainer.plan.trained_parameters)
        # Without what was there before, and may have been let go.
        assert taken <= memory
        held = sum(
            value.nbytes for state in trainer.optimizer.state.values() for value in state.values()
        )
        assert held <= memory / 2
    assert len(trained) > 10
    assert caplog.text.count("begins anew") == 1


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
    assert report.full_step_seconds > 0
    kept = trainer.profile
    trainer.fit(vectors(2))
    # What training measures refines an estimate; the graph is traced once.
    assert trainer.profile.graph is kept.graph and trainer.profile.saved is kept.saved


def test_where_times_are_not_measured_costs_of_another_batch_hold_and_of_another_model_do_not() -> (
    None
):
    model = chain()
    other = flat_profile(model, vectors(size=4)[0])
    options = TrainerOptions(timing=Timing(closed_loop=False))
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), profile=other, options=options)
    assert trainer.fit(vectors(2)).predicted_seconds == 2 * other.full_step_seconds
    assert trainer.profile is other
    model[6] = nn.Linear(12, 3, bias=False)
    trainer.fit(vectors(2))
    assert trainer.profile is not other and "6.weight" in trainer.update().deltas


def test_a_deep_fit_that_cannot_send_everything_sends_what_was_left_out_longest() -> None:
    batches, model = vectors(4), chain()
    profile = flat_profile(model, batches[0])
    sizes = profile.parameter_bytes
    # Room for the head and the largest other group, not for everything.
    budget = Budget(speedup=1.5, uplink=float(sizes[0] + sizes[1:].max()))
    trained = set()
    state = SelectionState()
    for _ in range(8):
        trainer = ElasticTrainer(
            model, loss_fn, sgd, budget=budget, profile=profile, state=state,
            options=TrainerOptions(full_update_every=1, timing=Timing(closed_loop=False)),
        )  # fmt: skip
        report = trainer.fit(batches)
        assert report.plan.policy == "full"
        assert sizes[report.plan.mask].sum() <= budget.uplink
        trained |= set(report.plan.trained_parameters)
    assert trained == {name for group in profile.graph.groups for name in group.parameters}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0, 1.57, 2.3, 3.99])
@pytest.mark.parametrize("deep_every", [0, 1])
def test_a_deadline_is_held_and_leaves_no_time_for_another_step(
    share: float, deep_every: int
) -> None:
    batches, model = vectors(20), chain()
    profile = flat_profile(model, batches[0])
    deadline = share * profile.full_step_seconds
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(deadline=deadline), profile=profile,
        options=TrainerOptions(full_update_every=deep_every, timing=Timing(closed_loop=False)),
    )  # fmt: skip
    head = trainer_of(chain(), batches[0], ["6"]).fit(batches).plan.predicted_step_seconds
    if deadline < head:
        with pytest.raises(BudgetError):
            trainer.fit(batches)
        return
    report = trainer.fit(batches)
    ends = [*(at for at, _ in report.plans[1:]), report.steps]
    steps = [end - at for end, (at, _) in zip(ends, report.plans, strict=True)]
    spent = sum(
        count * plan.predicted_step_seconds
        for count, (_, plan) in zip(steps, report.plans, strict=True)
    )
    assert report.predicted_seconds == pytest.approx(spent)
    assert spent <= deadline * (1 + 1e-9)
    assert deadline - spent < report.plan.predicted_step_seconds * (1 + 1e-9)
    trained = {name for _, plan in report.plans for name in plan.trained_parameters}
    assert trained == set(report.plan.trained_parameters)


@pytest.mark.parametrize("seed", range(12))
def test_budgets_hold_by_predicted_seconds(seed: int) -> None:
    """A step of the chain's head takes 6 s, one of everything 15."""
    draw = np.random.default_rng(seed)
    steps, per_step = int(draw.integers(16, 60)), float(draw.uniform(6.5, 14.5))
    batches, model = vectors(steps), chain()
    profile = flat_profile(model, batches[0])
    full = profile.full_step_seconds
    speedup = seed % 2 == 0
    budget = Budget(speedup=full / per_step) if speedup else Budget(deadline=per_step * steps)
    report = ElasticTrainer(
        model, loss_fn, sgd, budget=budget, profile=profile, state=state_with(
            ("6", "4", "2", "0"), [float(each) for each in draw.uniform(0.1, 1.0, 4)], [0] * 4, 0, 10_000,
        ), options=TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False)),
    ).fit(batches)  # fmt: skip
    # A speed-up holds on average: half a step may be overdrawn.
    assert report.predicted_seconds <= per_step * steps + (full / 2 if speedup else 1e-6)
    assert report.steps > 0 and len(report.plans) == 1


@pytest.mark.parametrize("policy", ["elastic", "random", "joint", "tinytrain", "last_k"])
@pytest.mark.parametrize("limit", ["uplink", "bandwidth"])
def test_plans_of_one_fit_together_send_no_more_than_the_uplink(policy: str, limit: str) -> None:
    for seed in range(1):
        batches, model = images(40, seed=seed), conv_net()
        profile = flat_profile(model, batches[0])
        everything = float(profile.parameter_bytes.sum())
        steps = 40 * profile.full_step_seconds
        budget = (
            Budget(uplink=0.5 * everything, speedup=1.5)
            if limit == "uplink"
            else Budget(deadline=steps, bandwidth=everything / (0.8 * steps))
        )
        trainer = ElasticTrainer(
            model, loss_fn, sgd, budget=budget, profile=profile, policy=policy,
            **settings_of(
                full_update_every=0, seed=seed, closed_loop=False, probe_every=3, below_cosine=2.0,
                smoothing=0.0,
            ),
        )  # fmt: skip
        report = trainer.fit(batches)
        update = trainer.update()
        parameters = dict(model.named_parameters())
        sent = 0.0
        for name, delta in update.deltas.items():
            if name in parameters:
                part = trained_part(update, name)
                share = 1.0 if part is None else np.broadcast_to(part, delta.shape).mean()
                sent += share * delta.nbytes
        if budget.uplink is not None:
            assert sent <= budget.uplink * (1 + 1e-9)
        else:
            spent = report.predicted_seconds + budget.sending_seconds(sent)
            assert spent <= steps * (1 + 1e-6)


@pytest.mark.parametrize("share", [14.1, 15.3, 17.7, 20.2, 23.9, 30.4])
def test_probes_in_the_middle_of_a_fit_stay_inside_the_deadline(share: float) -> None:
    batches, model = vectors(60), chain()
    profile = flat_profile(model, batches[0])
    deadline = share * profile.full_step_seconds
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(deadline=deadline), profile=profile,
        **settings_of(
            full_update_every=0, closed_loop=False, probe_every=1, below_cosine=2.0, exploration=0.0
        ),
    )  # fmt: skip
    report = trainer.fit(batches)
    assert report.based_on == "measured importance"
    assert report.predicted_seconds <= deadline * (1 + 1e-9)


@pytest.mark.parametrize("deep_every", [1, 4])
@pytest.mark.parametrize("budget", [Budget(memory=10.0), Budget(uplink=10.0)])
def test_a_fit_that_would_train_everything_is_refused_where_not_even_the_head_fits(
    budget: Budget, deep_every: int
) -> None:
    batches, model = vectors(4), chain()
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=budget, profile=flat_profile(model, batches[0]),
        options=TrainerOptions(full_update_every=deep_every, timing=Timing(closed_loop=False)),
        state=SelectionState(known=False),
    )  # fmt: skip
    with pytest.raises(BudgetError, match="not even the head"):
        trainer.fit(batches)


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (cross_entropy, 1), (cross_entropy, 8), (nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 2.0])), 3),
        (partial(cross_entropy, reduction="sum"), 3), (nn.CrossEntropyLoss(ignore_index=2), 5),
        (lambda outputs, targets: cross_entropy(outputs, targets), 3),
    ],
)  # fmt: skip
def test_the_loss_is_the_mean_over_examples_and_not_over_batches(
    loss: Callable[..., torch.Tensor], last: int
) -> None:
    draw = torch.Generator().manual_seed(3)
    batches = [
        (5 * torch.randn(size, 4, generator=draw), torch.randint(3, (size,), generator=draw))
        for size in (8, 8, last)
    ]
    batches[0][1][:6] = -100 if loss is cross_entropy else batches[0][1][:6]
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    frozen_by_its_rate = partial(torch.optim.SGD, lr=0.0)
    trainer = ElasticTrainer(model, loss, frozen_by_its_rate, budget=Budget())
    report = trainer.fit(batches, epochs=2)
    expected = evaluate(model, loss, batches).loss
    with pytest.raises(TrainingError, match="Target 7 is out of bounds"):
        trainer.fit([(batches[0][0], torch.full_like(batches[0][1], 7))])
    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert report.to_metrics()["train-loss"] == report.loss
