"""What changes a model outside of its steps: optimisers without gradients, targets that follow, states, thawing."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from odd_optimizers import OPTIMIZERS, sgd
from plain_loop import assert_weights, plain_steps
from slow_ones import slow_unless
from small_models import same_weights, weights_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_elastic import Budget, ElasticTrainer, TrainerOptions
from fl_elastic.errors import ElasticError, ModelError, TrainingError
from fl_elastic.profiling import profile_model
from fl_elastic.testing.probes import Snapshot
from fl_elastic.training import ForwardOptions, apply_plan, changed, evaluate, plan_for
from fl_elastic.training.apply_plan import FrozenGuard
from fl_elastic.update import Manifest

Batches = list[tuple[Tensor, Tensor]]


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def data(count: int = 5) -> Batches:
    torch.manual_seed(4)
    return [(torch.randn(6, 6), torch.randint(3, (6,))) for _ in range(count)]


def by_hand(
    model: nn.Module, optimizer_fn: Any, batches: Batches, trained: set[str] | None = None
) -> dict[str, Tensor]:
    """A plain loop; what is not trained is put back after every step."""
    model.train()
    before = weights_of(model)
    optimizer = optimizer_fn([p for p in model.parameters() if p.requires_grad])
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            if trained is not None and name not in trained:
                parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if trained is not None and name not in trained:
                    parameter.copy_(before[name])
    return weights_of(model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["full", "head", "last_k", "elastic"])
def test_any_optimiser_trains_what_the_plan_says_and_nothing_else(kind: str, policy: str) -> None:
    model = net()
    start, twin = weights_of(model), copy.deepcopy(model)
    step = torch.optim.Optimizer.step, type(OPTIMIZERS[kind](twin.parameters())).step
    trainer = ElasticTrainer(model, cross_entropy, OPTIMIZERS[kind], budget=Budget(), policy=policy)
    report = trainer.fit(data())
    trained = set(report.plan.trained_parameters)
    assert_weights(model, by_hand(twin, OPTIMIZERS[kind], data(), trained))
    now = model.state_dict()
    assert {name for name in start if not torch.equal(now[name], start[name])} <= trained
    assert set(trainer.update().deltas) == trained
    # A class that a fit has changed would fail in the user's own loop from then on.
    assert step == (torch.optim.Optimizer.step, type(OPTIMIZERS[kind](twin.parameters())).step)
    by_hand(net(), OPTIMIZERS[kind], data())


def test_a_base_that_its_owner_has_frozen_is_not_copied_for_any_optimiser() -> None:
    model = net()
    model[0].requires_grad_(False)
    plan = plan_for(model, cross_entropy, data(), budget=Budget(), policy="head")
    for parameters in (model[2:].parameters(), model.parameters()):
        optimizer = OPTIMIZERS["zealous"](parameters)
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        still = FrozenGuard(model, plan, optimizer).still
        assert {id(each) for each in still} == known - {id(each) for each in model[4].parameters()}
    assert not FrozenGuard(model, plan, sgd(model.parameters())).still


def test_an_optimiser_that_only_says_in_its_step_that_it_needs_a_closure_is_refused() -> None:
    class Sharp(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is None:
                raise RuntimeError("Sharp requires closure.")
            return super().step(closure)

    model = net()
    start = weights_of(model)
    trainer = ElasticTrainer(
        model, cross_entropy, lambda p: Sharp(p, lr=0.1), budget=Budget(), policy="full"
    )
    with pytest.raises(TrainingError, match="Sharp evaluates the loss several times a step"):
        trainer.fit(data())
    assert same_weights(start, model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fit_that_fails_leaves_any_optimiser_as_it_was(kind: str) -> None:
    """Going on after a failure ends where going on without it does."""
    ends = []
    for fails in (False, True):
        model = net()
        trainer = ElasticTrainer(
            model, cross_entropy, OPTIMIZERS[kind], budget=Budget(), policy="full"
        )
        trainer.fit(data(3))
        if fails:
            bad = (torch.full((6, 6), torch.nan), torch.zeros(6, dtype=torch.long))
            with pytest.raises(TrainingError, match="the loss is nan"):
                trainer.fit([*data(2), bad])
        trainer.fit(data(4))
        ends.append(weights_of(model))
    assert_weights(model, ends[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["plain", *OPTIMIZERS])
def test_an_own_loop_under_a_plan_keeps_what_is_frozen(kind: str) -> None:
    model, optimizer_fn = net(), OPTIMIZERS.get(kind, sgd)
    start, twin = weights_of(model), copy.deepcopy(model)
    plan = plan_for(
        model, cross_entropy, data(), budget=Budget(), policy="head", optimizer_fn=optimizer_fn
    )
    optimizer = optimizer_fn(model.parameters())
    own = dict(vars(optimizer))
    with apply_plan(model, plan, optimizer):
        plain_steps(model, optimizer, data())
    assert vars(optimizer).keys() == own.keys()
    trained = set(plan.trained_parameters)
    assert_weights(model, by_hand(twin, optimizer_fn, data(), trained))
    update = changed(model, start, plan, steps=5, num_examples=30)
    assert set(update.deltas) == trained == {"4.weight", "4.bias"}


def test_an_own_loop_says_also_what_its_optimiser_moved_besides() -> None:
    model = net()
    start = weights_of(model)
    plan = plan_for(model, cross_entropy, data(), budget=Budget(), policy="head")
    optimizer = OPTIMIZERS["zealous"](model.parameters())
    with apply_plan(model, plan):
        plain_steps(model, optimizer, data())
    moved = {n for n, each in model.state_dict().items() if not torch.equal(each, start[n])}
    assert moved > set(plan.trained_parameters)
    assert set(changed(model, start, plan, steps=5, num_examples=30).deltas) == moved


class Followed(nn.Module):
    """Learns to predict what a target that follows it in `forward` makes of the input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.how = how
        self.online, self.predictor = nn.Linear(6, 8), nn.Linear(8, 8)
        self.target = nn.Linear(6, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
            for slow, fast in pairs:
                if self.how == "data":
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
                elif self.how == "exchanged":
                    slow.data = slow.data * 0.9 + fast.data * 0.1
                else:
                    slow.lerp_(fast, 0.1)
            wanted = self.target(x)
        return ((self.predictor(self.online(x)) - wanted) ** 2).mean()


def own(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


@pytest.mark.parametrize("how", ["data", "exchanged", "in place"])
@pytest.mark.parametrize("policy", ["full", "elastic"])
def test_a_target_that_follows_in_forward_is_a_part_of_the_update(how: str, policy: str) -> None:
    model = Followed(how)
    start, twin = weights_of(model), copy.deepcopy(model)
    trainer = ElasticTrainer(
        model, own, sgd, budget=Budget(), policy=policy, manifest=Manifest.of(model, whole=True)
    )
    trainer.fit(data())
    optimizer = sgd([p for p in twin.parameters() if p.requires_grad])
    plain_steps(twin, optimizer, data(), own)
    update = trainer.update()
    assert set(update.deltas) == set(start) and set(update.steps.values()) == {5}
    assert_weights(model, twin)
    sent = {name: start[name] + torch.from_numpy(each) for name, each in update.deltas.items()}
    assert_weights(twin, sent)
    assert not torch.equal(model.target.weight, start["target.weight"])


@pytest.mark.parametrize("how", ["data", "exchanged", "in place"])
def test_measuring_and_asking_move_no_target(how: str) -> None:
    model = Followed(how)
    start = weights_of(model)
    profile_model(model, own, data()[0], optimizer_fn=sgd)
    plan_for(model, own, data(), budget=Budget(speedup=1.5), optimizer_fn=sgd)
    assert same_weights(start, model)


def test_a_target_that_moves_and_does_not_travel_is_no_silent_loss() -> None:
    model = Followed("data")
    trainer = ElasticTrainer(model, own, sgd, budget=Budget(), policy="full")
    trainer.fit(data())
    with pytest.raises(TrainingError, match=r"'target.bias'.*initial_arrays\(model, whole=True\)"):
        trainer.update()


class Normed(nn.Module):
    """A layer that its first batch initialises, and a flag that says so."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.register_buffer("done", torch.zeros((), dtype=kind))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.done:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.done.fill_(1)
        return x + self.shift


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: Normed(torch.bool), "1.done"),
        (lambda: Normed(torch.float32), ""),
        (lambda: nn.BatchNorm1d(4, momentum=None), "1.num_batches_tracked"),
        (lambda: nn.BatchNorm1d(4), ""),
    ],
)
def test_whole_numbers_that_move_and_do_not_travel_are_said(
    layer: Callable[[], nn.Module], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 4), layer(), nn.Linear(4, 3))
    batches = [(torch.randn(6, 6), torch.randint(3, (6,))) for _ in range(2)]
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    trainer.update()
    assert ("the integer buffer" in caplog.text) == bool(said) and said in caplog.text


class Highest(nn.Module):
    """Keeps the largest number that it has seen, as an observer of ranges does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(5.0))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.most.copy_(torch.maximum(self.most, x.detach().max()))
        return x


@pytest.mark.parametrize("size", [0.1, 100.0])
def test_a_buffer_that_was_written_is_in_the_update_whether_it_has_moved_or_not(
    size: float,
) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(Highest(), nn.Linear(6, 3))
    batches = [(size * torch.randn(6, 6), torch.randint(3, (6,))) for _ in range(2)]
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    update = trainer.update()
    assert set(update.deltas) == {"0.most", "1.weight", "1.bias"} and update.steps["0.most"] == 2
    assert bool(update.deltas["0.most"] > 0) == (size > 1)


def test_an_embedding_that_scales_its_rows_where_it_is_frozen_says_so() -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 3))
    start = weights_of(model)
    batches = [(torch.randint(9, (6, 3)), torch.randint(3, (6,))) for _ in range(4)]
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="head")
    trainer.fit(batches)
    update = trainer.update()
    assert set(update.deltas) == {"0.weight", "2.weight", "2.bias"}
    moved = model[0].weight.detach() - start["0.weight"]
    torch.testing.assert_close(torch.from_numpy(update.deltas["0.weight"]), moved)


class Recurrent(nn.Module):
    """Goes on from the state that the batch before has left, in an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kind = kind
        self.below = nn.Linear(3, 3)
        self.cell: Any = nn.LSTM(3, 8) if kind == "pair" else nn.GRU(3, 8)
        self.head = nn.Linear(8, 3)
        self.hidden: Any = [] if kind == "list" else {} if kind == "dict" else None
        if kind == "object":
            self.hidden = SimpleNamespace(states=[torch.zeros(1, 6, 8)], seen=0)
        elif kind == "array":
            self.hidden = np.zeros((1, 6, 8), np.float32)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        known = self.hidden
        if self.kind == "list":
            known = self.hidden[-1] if self.hidden else None
        elif self.kind == "dict":
            known = self.hidden.get("state")
        elif self.kind == "object":
            known = self.hidden.states[-1]
        elif self.kind == "array":
            known = torch.tensor(self.hidden)
        if self.kind == "in place" and known is not None:
            # What the way back needs is not written.
            known = known.clone()
        outputs, state = self.cell(torch.relu(self.below(x.view(6, 2, 3).transpose(0, 1))), known)
        self.calls += 1
        if self.kind == "pair":
            self.hidden = tuple(each.detach() for each in state)
        elif self.kind == "list":
            self.hidden.append(state.detach())
        elif self.kind == "dict":
            self.hidden["state"] = state.detach()
        elif self.kind == "object":
            self.hidden.states.append(state.detach())
            self.hidden.seen += 1
        elif self.kind == "array":
            self.hidden[...] = state.detach().numpy()
        elif self.kind == "in place" and self.hidden is not None:
            self.hidden.copy_(state.detach())
        else:
            self.hidden = state.detach()
        found: Tensor = self.head(outputs[-1])
        return found


HELD = ["plain", "pair", "list", "dict", "in place", "object", "array"]
BUDGETS = {"none": Budget(), "memory": Budget(memory=60_000)}


@pytest.mark.parametrize(
    ("kind", "budget", "policy"),
    slow_unless(
        lambda kind, budget, policy: budget == "memory" or policy == "elastic",
        product(HELD, BUDGETS, ["full", "elastic", "head"]),
    ),
)
def test_a_state_from_batch_to_batch_is_that_of_a_plain_loop(
    kind: str, budget: str, policy: str
) -> None:
    model = Recurrent(kind)
    twin = copy.deepcopy(model)
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=BUDGETS[budget], policy=policy)
    plans = [trainer.fit(data()).plan for _ in range(2)]
    evaluate(model, cross_entropy, data(2))
    assert trainer.update().deltas
    if any(plan.trained_parameters != plans[0].trained_parameters for plan in plans):
        pytest.skip("the plan moved between the fits")
    trained = set(plans[0].trained_parameters)
    optimizer = sgd(twin.parameters())
    for x, y in data() * 2:
        optimizer.zero_grad()
        cross_entropy(twin(x), y).backward()
        for name, parameter in twin.named_parameters():
            if name not in trained:
                parameter.grad = None
        optimizer.step()
    assert_weights(model, twin, rtol=1e-4, atol=1e-6)
    assert model.calls == twin.calls == 10


@pytest.mark.parametrize("kind", HELD)
def test_a_model_that_has_run_before_is_priced_under_a_memory_budget(kind: str) -> None:
    """Its state is that of a whole batch: a part of one does not fit beside it."""
    model = Recurrent(kind)
    model(data()[0][0])
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=BUDGETS["memory"], policy="last_k")
    assert trainer.fit(data()).steps == 5


class Noisy(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.below, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_numpy, self.of_python = np.random.default_rng(1), random.Random(1)
        # States with arrays in them, and a generator without a state.
        self.listed = [np.random.Generator(np.random.MT19937(1)), random.SystemRandom()]
        self.older = np.random.RandomState(1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[0], 8, generator=self.of_torch)
        noise += torch.from_numpy(self.of_numpy.normal(size=8)).float() + self.of_python.random()
        noise += self.listed[0].random() + self.older.random_sample()
        found: Tensor = self.head(torch.relu(self.below(x)) + 0.1 * noise)
        return found


@pytest.mark.parametrize("policy", ["full", "elastic"])
def test_generators_of_a_models_own_go_on_as_in_a_plain_loop(policy: str) -> None:
    model, twin = Noisy(), Noisy()
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy=policy)
    trainer.fit(data())
    evaluate(model, cross_entropy, data(2))
    trainer.fit(data())
    optimizer = sgd(twin.parameters())
    plain_steps(twin, optimizer, data() * 2)
    assert_weights(model, twin)


class RecurrentBelow(nn.Module):
    """Features that depend on the batches before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.cell, self.head, self.hidden = nn.GRUCell(6, 8), nn.Linear(8, 3), torch.zeros(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x, self.hidden)
        self.hidden = state.detach()
        found: Tensor = self.head(torch.relu(state))
        return found


@pytest.mark.parametrize("make", [RecurrentBelow, *(lambda k=k: Recurrent(k) for k in HELD)])
def test_features_that_depend_on_batches_before_are_not_kept(make: Callable[[], nn.Module]) -> None:
    """What holds a state above the cut goes on as ever."""
    model = make()
    plain = copy.deepcopy(model)
    options = TrainerOptions(forward=ForwardOptions(feature_bytes=1 << 20, precision="fp32"))
    kept = ElasticTrainer(
        model, cross_entropy, sgd, budget=Budget(), policy="head", options=options
    )
    report = kept.fit(data(), epochs=2)
    ElasticTrainer(plain, cross_entropy, sgd, budget=Budget(), policy="head").fit(data(), epochs=2)
    assert report.forward is not None
    if isinstance(model, RecurrentBelow):
        assert "from batch to batch" in report.forward.refused
    assert_weights(model, plain)


class Unset(nn.Module):
    """Holds numbers that nobody has set yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.full((3,), torch.nan))
        self.latest, self.earlier = torch.full((2,), torch.nan), np.full(2, np.nan)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_nan_that_stays_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Unset(), nn.Linear(8, 3))
    options = TrainerOptions(forward=ForwardOptions(feature_bytes=1 << 20))
    trainer = ElasticTrainer(
        model, cross_entropy, sgd, budget=Budget(), policy="head", options=options
    )
    report = trainer.fit(data(), epochs=2)
    assert report.forward is not None and not report.forward.refused and report.forward.found
    assert set(trainer.update().deltas) == {"3.weight", "3.bias"} and not caplog.text


@pytest.mark.parametrize("policy", ["full", "last_k", "elastic"])
def test_a_layer_that_is_thawed_between_two_fits_is_trained_and_sent(policy: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    twin = copy.deepcopy(model)
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy=policy)
    trainer.fit(data())
    assert set(trainer.update().deltas) == {"2.weight", "2.bias", "4.weight", "4.bias"}
    model[0].requires_grad_(True)
    report = trainer.fit(data())
    update = trainer.update()
    assert set(report.plan.trained_parameters) == set(update.deltas) == set(model.state_dict())

    # The momentum of what trained before is kept, as by a group that is added to an optimiser.
    optimizer = sgd([p for p in twin.parameters() if p.requires_grad])
    for thawed in (False, True):
        if thawed:
            twin[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*twin[0].parameters()]})
        plain_steps(twin, optimizer, data())
    assert_weights(model, twin)


def test_a_layer_that_is_frozen_or_exchanged_between_two_fits_is_what_it_is_now() -> None:
    model = net()
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full")
    trainer.fit(data())
    model[0].requires_grad_(False)
    before = weights_of(model)
    trainer.fit(data())
    assert set(trainer.update().deltas) == {"2.weight", "2.bias", "4.weight", "4.bias"}
    assert torch.equal(model[0].weight, before["0.weight"])
    model[4] = nn.Linear(8, 5)
    trainer.fit(data())
    assert trainer.update().deltas["4.weight"].shape == (5, 8)


@pytest.mark.parametrize("kind", ["sgd", *OPTIMIZERS])
@pytest.mark.parametrize(
    ("policy", "budget"),
    [("full", Budget()), ("elastic", Budget(memory=2e5)), ("elastic", Budget(speedup=1.5)),
     ("tinytrain", Budget(speedup=1.5)), ("sparse_update", Budget(memory=2e5)), ("neq", Budget())],
)  # fmt: skip
def test_nothing_of_the_users_or_torchs_is_another_after_a_fit(
    kind: str, policy: str, budget: Budget
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    model.register_forward_hook(lambda *_: None)
    torch.manual_seed(9)
    batches = [(torch.randn(6, 3, 12, 12), torch.randint(3, (6,))) for _ in range(4)]
    optimizer = OPTIMIZERS.get(kind, sgd)(model.parameters())
    # Torch itself wraps the step of a class when the first optimiser of it is made.
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    before = Snapshot(model, optimizer)
    trainer = ElasticTrainer(
        model, cross_entropy, lambda _: optimizer, budget=budget, policy=policy
    )
    with contextlib.suppress(ElasticError):
        trainer.fit(batches)
        trainer.fit(batches)
    assert before.foreign() == []
    with contextlib.suppress(ElasticError):
        trainer.fit([*batches, (torch.full((6, 3, 12, 12), torch.nan), batches[0][1])])
    assert before.foreign() == []


def test_what_is_changed_of_the_users_or_torchs_is_seen() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    ways: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
        "hooks of 2": lambda _: model[2].register_forward_hook(lambda *_: None),
        "attributes of 0": lambda patch: patch.setattr(model[0], "note", 1, raising=False),
        "class of 1": lambda patch: patch.setattr(model[1], "__class__", nn.Tanh),
        "methods of Optimizer": lambda patch: patch.setattr(
            torch.optim.Optimizer, "note", 1, raising=False
        ),
        "methods of SGD": lambda patch: patch.setattr(torch.optim.SGD, "step", lambda *_: None),
        "flag of 0.weight": lambda _: model[0].weight.requires_grad_(False),
        "attributes of the optimiser": lambda patch: patch.setattr(
            optimizer, "step", lambda: None, raising=False
        ),
    }
    for name, change in ways.items():
        before = Snapshot(model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            assert name in before.foreign()


class Centred(nn.Module):
    """A loss that follows the outputs, as that of a self-distillation does."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compare, and let the centre follow."""
        loss = cross_entropy(outputs - self.center, targets)
        self.calls += 1
        with torch.no_grad():
            self.center.lerp_(outputs.mean(0), 0.5)
        return loss


class CentredObject:
    """The same loss as a plain object."""

    def __init__(self) -> None:
        self.center, self.calls = torch.zeros(3), 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return Centred.forward(self, outputs, targets)  # type: ignore[arg-type]


class CentredTask(CentredObject):
    """The same loss as a method of an object."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compare, and let the centre follow."""
        return self(outputs, targets)


def losses(kind: str) -> tuple[Any, Any]:
    """A loss and the object that holds its state."""
    if kind == "method":
        task = CentredTask()
        return task, task.loss
    made = CentredObject() if kind == "object" else Centred()
    if kind == "partial":
        return made, functools.partial(made)
    return made, (lambda outputs, targets: made(outputs, targets)) if kind == "closure" else made


@pytest.mark.parametrize("kind", ["module", "object", "method", "partial", "closure"])
@pytest.mark.parametrize("memory", [None, 1e8])
def test_a_loss_that_follows_the_outputs_sees_only_the_steps(
    kind: str, memory: float | None
) -> None:
    model = net()
    twin, batches = copy.deepcopy(model), data(6)
    holder, loss_fn = losses(kind)
    expected, expected_loss = losses(kind)
    optimizer = sgd(twin.parameters())
    plain_steps(twin, optimizer, batches, expected_loss)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(memory=memory), policy="full")
    trainer.fit(batches)
    assert holder.calls == expected.calls == 6
    torch.testing.assert_close(holder.center, expected.center)
    assert_weights(model, twin)


@pytest.mark.parametrize("policy", ["elastic", "tinytrain", "velocity", "joint"])
def test_choosing_leaves_the_state_of_a_loss_alone(policy: str) -> None:
    loss_fn = Centred()
    trainer = ElasticTrainer(net(), loss_fn, sgd, budget=Budget(speedup=1.5), policy=policy)
    assert trainer.fit(data(12)).steps == loss_fn.calls


class Normalised(nn.Module):
    """Keeps the mean of its inputs in a buffer and in an attribute, written without `no_grad`."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.last = torch.zeros(6)
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        """Follow the mean, and take it off."""
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            self.last.copy_(x[0])
        out: Tensor = self.body(x - self.mean + 0.01 * self.last)
        return out


@pytest.mark.parametrize("budget", [Budget(), Budget(memory=1e8), Budget(deadline=60.0)])
def test_what_a_model_writes_its_inputs_into_belongs_to_no_graph_of_a_probe(budget: Budget) -> None:
    model = Normalised()
    twin = copy.deepcopy(model)
    profile_model(model, cross_entropy, data()[0], optimizer_fn=sgd)
    expected = by_hand(twin, sgd, data())
    ElasticTrainer(model, cross_entropy, sgd, budget=budget, policy="full").fit(data())
    assert not model.mean.requires_grad and not model.last.requires_grad
    torch.testing.assert_close(model.last, twin.last)
    assert_weights(model, expected)


class Scaled(nn.Module):
    """A loss with a weight, and one that is the model's."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.scale, self.tied = nn.Parameter(torch.ones(())), model[4].weight

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compare scaled scores."""
        return cross_entropy(self.scale * outputs, targets) + 0.01 * self.tied.square().sum()


def test_weights_of_a_loss_are_said_to_stay_where_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    loss_fn = Scaled(model)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    assert "the loss has weights of its own (scale)," in caplog.text
    trainer.fit(data())
    assert loss_fn.scale.item() == 1.0 and "4.weight" in trainer.update().deltas
    caplog.clear()
    loss_fn.scale.requires_grad_(False)
    ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    assert caplog.text == ""


def test_an_optimiser_that_steps_in_the_backward_pass_is_refused_and_leaves_no_trace() -> None:
    model = net()
    start = weights_of(model)
    for parameter in model.parameters():
        alone = torch.optim.SGD([parameter], lr=0.1)

        def stepped(_: Tensor, alone: torch.optim.Optimizer = alone) -> None:
            alone.step()
            alone.zero_grad()

        parameter.register_post_accumulate_grad_hook(stepped)
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full")
    with pytest.raises(TrainingError, match=r"'0\.weight' was changed in the backward pass"):
        trainer.fit(data())
    profile_model(model, cross_entropy, data()[0], optimizer_fn=sgd)
    assert same_weights(start, model)


def test_hooks_that_only_look_at_complete_gradients_are_left_alone() -> None:
    model = net()
    twin, seen = copy.deepcopy(model), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad))
    ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full").fit(data())
    assert seen
    assert_weights(model, by_hand(twin, sgd, data()))


class MadeLater(nn.Module):
    """Makes its head once it sees the first features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), None

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        features = self.body(x).relu()
        if self.head is None:
            self.head = nn.Linear(features.shape[1], 3)
        out: Tensor = self.head(features)
        return out


@pytest.mark.parametrize("policy", ["full", "elastic", "head"])
def test_a_model_that_makes_its_layers_in_the_first_pass_is_told_so(policy: str) -> None:
    model = MadeLater()
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy=policy)
    with pytest.raises(ModelError, match=r"'head\.(weight|bias)'.*: run the model on a batch"):
        trainer.fit(data())
    assert list(model.state_dict()) == ["body.weight", "body.bias"]
    model(data()[0][0])
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full")
    trainer.fit(data())
    assert "head.weight" in trainer.update().deltas
