"""Optimisers as people make them: groups by name, schedules and clipping by torch's own hooks, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from plain_loop import assert_weights, plain_steps
from small_models import adam, conv_net, images, loss_fn, sgd
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.errors import TrainingError
from fl_elastic.profiling import estimate_profile
from fl_elastic.training import Timing, TrainerOptions

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def by_closure(model: nn.Module) -> MakeOptimizer:
    """Reads the model's own names, and never the parameters that it is given."""

    def optimizer_fn(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        head = [named.pop("11.weight"), named.pop("11.bias")]
        groups = [{"params": head, "lr": 0.1}, {"params": list(named.values())}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    return optimizer_fn


def by_identity(model: nn.Module) -> MakeOptimizer:
    """Tells the parameters that it is given by who they are."""
    known = {id(parameter) for parameter in model[-1].parameters()}

    def optimizer_fn(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        all_of_them = list(parameters)
        head = [each for each in all_of_them if id(each) in known]
        rest = [each for each in all_of_them if id(each) not in known]
        return torch.optim.SGD(
            [{"params": head, "lr": 0.1}, {"params": rest}], lr=0.01, momentum=0.9
        )

    return optimizer_fn


def by_name(model: nn.Module) -> MakeOptimizer:
    """Asks for names by the name of its parameter."""
    del model

    def optimizer_fn(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in named_parameters:
            groups[name.startswith("11.")].append((name, parameter))
        return torch.optim.SGD(
            [{"params": groups[True], "lr": 0.1}, {"params": groups[False]}], lr=0.01, momentum=0.9
        )

    return optimizer_fn  # type: ignore[return-value]


@pytest.mark.parametrize("make", [by_closure, by_identity, by_name])
@pytest.mark.parametrize("importance", ["elastic", "elastic_same_batch"])
def test_groups_of_an_optimizer_have_their_own_rates_in_probes_and_steps(
    make: Callable[[nn.Module], MakeOptimizer], importance: str
) -> None:
    torch.manual_seed(0)
    model, batches = conv_net(), images(4)
    trainer = ElasticTrainer(
        model, loss_fn, make(model), budget=Budget(speedup=1.5),
        options=TrainerOptions(importance=importance, timing=Timing(closed_loop=False)),
    )  # fmt: skip
    report = trainer.fit(batches)
    assert any(score != 0 for score in report.importance.values()) and report.importance["11"] != 0
    optimizer = trainer.optimizer
    assert optimizer is not None
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


class Noisy(torch.optim.SGD):
    """Adds noise to each gradient, as Langevin dynamics does, or rounds it at random."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
        return super().step(closure)


@pytest.mark.parametrize("closed_loop", [True, False])
@pytest.mark.parametrize("memory", [None, 1e9])
def test_an_optimizer_with_noise_draws_what_it_draws_in_a_plain_loop(
    closed_loop: bool, memory: float | None
) -> None:
    """Trying it out to learn its costs takes no random numbers from the steps."""

    def noisy(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Noisy(parameters, lr=0.1)

    model, batches = conv_net(), images(3)
    plain = copy.deepcopy(model)
    trainer = ElasticTrainer(
        model, loss_fn, noisy, budget=Budget(memory=memory), policy="full",
        options=TrainerOptions(timing=Timing(closed_loop=closed_loop)),
    )  # fmt: skip
    optimizer = noisy(plain.parameters())
    for seed in range(2):
        torch.manual_seed(seed)
        trainer.fit(batches)
        drawn = torch.get_rng_state()
        torch.manual_seed(seed)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_fn(plain(inputs), targets).backward()
            optimizer.step()
        assert torch.equal(drawn, torch.get_rng_state())
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_costs_are_of_the_optimizer_that_closes_over_the_model() -> None:
    """Its state was counted as nothing, since the weight it was tried out on was not among its own."""
    model, batch = conv_net(), images(1)[0]
    batch[1].clamp_(max=2)
    before = copy.deepcopy(model.state_dict())
    closes = estimate_profile(
        model, loss_fn, batch, optimizer_fn=lambda _: torch.optim.Adam(model.parameters(), lr=0.01)
    )
    plain = estimate_profile(model, loss_fn, batch, optimizer_fn=adam)
    assert closes.optimizer_bytes_per_weight == plain.optimizer_bytes_per_weight == 8.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        (lambda model: conv_net().parameters(), "none of"),
        (lambda model: model[-1].parameters(), "not update 0.weight"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(
    parameters: Callable[[nn.Module], Any], word: str
) -> None:
    model = conv_net()
    trainer = ElasticTrainer(
        model, loss_fn, lambda _: torch.optim.SGD(parameters(model), lr=0.1), budget=Budget()
    )
    with pytest.raises(TrainingError, match=word):
        trainer.fit(images(2))


def test_schedules_and_clipping_hang_on_the_optimizers_own_hooks() -> None:
    norms: list[float] = []

    def optimizer_fn(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        held = list(parameters)
        optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
        schedule = StepLR(optimizer, step_size=1, gamma=0.5)

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(held, 0.01)
            found = [each.grad.norm() for each in held if each.grad is not None]
            norms.append(float(torch.stack(found).norm()))

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    model = conv_net()
    trainer = ElasticTrainer(
        model, loss_fn, optimizer_fn, budget=Budget(speedup=1.3),
        options=TrainerOptions(importance="elastic_same_batch", timing=Timing(closed_loop=False)),
    )  # fmt: skip
    report = trainer.fit(images(5))
    optimizer = trainer.optimizer
    assert optimizer is not None
    # One step of the schedule for each step of training: probes and estimates have none.
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**report.steps)
    assert len(norms) >= report.steps and max(norms) <= 0.01 * 1.001


def test_a_hook_that_optimizer_fn_puts_on_gradients_acts_once() -> None:
    def optimizer_fn(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        held = list(parameters)
        for each in held:
            each.register_hook(lambda gradient: 0.5 * gradient)
        return sgd(held)

    model, batches = conv_net(), images(2)
    plain = copy.deepcopy(model)
    ElasticTrainer(model, loss_fn, optimizer_fn, budget=Budget()).fit(batches)
    plain_steps(plain, optimizer_fn(plain.parameters()), batches, loss_fn)
    assert_weights(model, plain, rtol=0, atol=0)


class InBfloat(nn.Module):
    """A model that runs in mixed precision."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.inner(x)
        return out.float()


class Checkpointed(nn.Module):
    """A model that computes its parts again on the way back."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.inner[:3], self.inner[3:6]):
            x = checkpoint(part, x, use_reentrant=False)  # type: ignore[no-untyped-call]
        out: Tensor = self.inner[6:](x)
        return out


POLICIES = ["full", "head", "elastic", "joint", "tinytrain", "gradient_filter"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrapped", [InBfloat, Checkpointed])
def test_mixed_precision_and_checkpointing_train_by_every_policy(
    wrapped: Callable[[nn.Sequential], nn.Module], policy: str
) -> None:
    torch.manual_seed(0)
    model = wrapped(conv_net())
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.5), policy=policy,
        options=TrainerOptions(timing=Timing(closed_loop=False)),
    )  # fmt: skip
    report = trainer.fit(images(3))
    assert report.steps > 0
    trained = [name for name, delta in trainer.update().deltas.items() if abs(delta).max() > 0]
    assert any(name.startswith("inner.11") for name in trained)


def test_an_optimizer_in_the_place_of_what_makes_one_is_refused() -> None:
    model = conv_net()
    made: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TrainingError, match="optimizer_fn of type SGD cannot be called"):
        ElasticTrainer(model, loss_fn, made, budget=Budget()).fit(images(2))
