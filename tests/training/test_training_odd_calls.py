"""Models that write their input, are called twice, or compute their weights: found by random models."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kept_bytes import kept_bytes
from small_models import (
    conv_net,
    images,
    loss_fn,
    same_weights,
    sgd,
    trainer_of,
    vectors,
    weights_of,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fl_elastic.budget import Budget
from fl_elastic.errors import ModelError
from fl_elastic.groups.forward import call_model, compute_loss
from fl_elastic.groups.mode import Mode
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.ops.lean import lean
from fl_elastic.ops.lean_kind import LeanKind, lean_kind
from fl_elastic.ops.split import SplitModel
from fl_elastic.planning import POLICIES, PlanRequest
from fl_elastic.planning.importance import CHANNEL_SCORES
from fl_elastic.planning.importance.base import Probe
from fl_elastic.planning.importance.fidelity import visit_layers
from fl_elastic.planning.recompute import Recomputation
from fl_elastic.profiling import estimate_profile
from fl_elastic.profiling.memory import step_memory
from fl_elastic.training import ElasticTrainer, ForwardOptions
from fl_elastic.training.apply_plan import plan_applied


class WritesInput(nn.Module):
    """Halves what it is given, in place."""

    def __init__(self, always: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or bool(x[0, 0] > 0):
            x.mul_(0.5)
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_an_elastic_forward_pass_leaves_the_batches_of_a_model_that_writes_its_input(
    cache: int,
) -> None:
    model, batches = WritesInput(), vectors(4)
    before = copy.deepcopy(batches)
    twin = copy.deepcopy(model)
    trainer = trainer_of(
        model, copy.deepcopy(batches[0]), ["second"],
        forward=ForwardOptions(feature_bytes=cache, precision="fp32"),
    )  # fmt: skip
    report = trainer.fit(batches, epochs=2)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(before, batches, strict=True))
    assert report.forward is not None and not report.forward.refused
    twin.first.requires_grad_(False)
    optimizer = sgd(twin.second.parameters())
    for inputs, targets in [*before, *before]:
        optimizer.zero_grad()
        loss_fn(twin(inputs.clone()), targets).backward()
        optimizer.step()
    assert all(
        torch.allclose(value, model.state_dict()[name], atol=1e-6)
        for name, value in twin.state_dict().items()
    )


def test_a_model_that_writes_its_input_for_some_batches_alone_gets_copies_from_then_on() -> None:
    model = WritesInput(always=False)
    positive, negative = torch.ones(2, 6), -torch.ones(2, 6)
    targets = torch.zeros(2, dtype=torch.long)
    for inputs in (positive, negative, positive):
        compute_loss(model, loss_fn, (inputs, targets))
    assert torch.equal(positive, torch.ones(2, 6))


def test_calling_a_model_leaves_its_inputs() -> None:
    inputs = torch.ones(2, 6)
    call_model(WritesInput(), inputs)
    assert torch.equal(inputs, torch.ones(2, 6))
    with torch.inference_mode():
        drawn = torch.ones(2, 6)
        call_model(nn.Linear(6, 2), drawn)
        call_model(nn.Linear(6, 2), drawn)


class RoutedTwice(nn.Module):
    """A block that is called twice and has two ways through it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.block = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        second = 0 if x[0, 0, 0, 0] > 0 else 1
        y = self.block[0](torch.relu(self.stem(x)))
        y = self.block[second](torch.relu(y))
        out: Tensor = self.head(y.mean((2, 3)))
        return out


def test_a_layer_that_a_probe_batch_calls_twice_is_visited_at_each_call() -> None:
    model = RoutedTwice()
    inputs, targets = images(1)[0]
    inputs[0, 0, 0, 0] = 1.0
    seen = []
    visit_layers(
        model, loss_fn, (inputs, targets), {7: model.block[0]},
        lambda key, _, given, gradient: seen.append((key, given.shape, gradient.shape)),
    )  # fmt: skip
    assert seen == [(7, (6, 4, 8, 8), (6, 4, 8, 8))] * 2


class Twice(nn.Module):
    """Calls a block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Sometimes())
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(torch.tanh(self.inner(x))).mean((2, 3)))
        return out


class Sometimes(nn.Module):
    """A layer that only the second call of a block comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = x if self.calls % 2 else self.norm(self.layer(x))
        return out


def test_a_block_that_also_ran_before_the_cut_is_no_place_to_cut() -> None:
    model, batch = Twice(), images(1)[0]
    with untouched(model):
        graph = trace_step(model, loss_fn, batch).graph
    assert graph.cuts
    for cut in graph.cuts:
        assert not [name for name, _ in cut.skipped if cut.module.startswith(f"{name}.")]


def test_a_split_that_does_not_work_is_left_before_the_whole_model_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> None:
        raise ModelError("no")

    monkeypatch.setattr(SplitModel, "check", refused)
    model, batches = conv_net(), images(3)
    model.insert(6, nn.BatchNorm2d(8, affine=False))
    twin = copy.deepcopy(model)
    trainer = trainer_of(model, batches[0], ["12"], forward=ForwardOptions())
    plain = trainer_of(twin, batches[0], ["12"])
    assert trainer.fit(batches).forward is not None
    plain.fit(batches)
    # The statistics of a norm without parameters move in every step of a whole model.
    assert same_weights(weights_of(twin), model)


def test_choosing_channels_moves_no_vector_of_a_spectral_norm() -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, padding=1)), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 3),
    )  # fmt: skip
    batch = images(1)[0]
    with untouched(model):
        graph = trace_step(model, loss_fn, batch).graph
    before = weights_of(model)
    for name in ("l2", "fisher"):
        probe = Probe(
            model=model, loss_fn=loss_fn, groups=graph.groups, batches=[batch],
            shadow_optimizer=sgd, generator=np.random.default_rng(0),
        )  # fmt: skip
        scores = CHANNEL_SCORES.make(name).score(probe, graph)
        assert "2" in scores and not [group for group in scores if group.startswith("0")]
        assert same_weights(before, model), name


def test_a_norm_without_parameters_is_lean_only_where_it_is_at_rest() -> None:
    norm = nn.BatchNorm2d(4, affine=False)
    node = "NativeBatchNormBackward0"
    assert lean_kind(norm, node, (2, 4, 3, 3)) is LeanKind.NONE
    assert lean_kind(norm.eval(), node, (2, 4, 3, 3)) is LeanKind.NORM
    assert lean_kind(nn.BatchNorm2d(4), node, (2, 4, 3, 3)) is LeanKind.NORM


class Scale(nn.Module):
    """A factor per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_memory_counts_the_input_of_a_norm_in_bias_mode_and_not_that_of_a_frozen_factor() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Scale(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 3)
    )
    profile = estimate_profile(model, loss_fn, images(1)[0], optimizer_fn=sgd)
    assert [group.name for group in profile.graph.groups] == ["4", "2", "1.factor", "0"]

    def kept(*modes: Mode) -> float:
        return step_memory(profile, modes, lean=True).activations

    one, off = 4 * 6 * 8 * 8 * 8, Mode.FROZEN
    frozen = kept(Mode.FULL, off, off, Mode.BIAS)
    assert kept(Mode.FULL, Mode.BIAS, off, Mode.BIAS) - frozen >= one
    assert kept(Mode.FULL, off, Mode.FULL, Mode.BIAS) - frozen >= one


def test_memory_counts_the_channels_that_a_depthwise_layer_reads() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 3)
    )
    profile = estimate_profile(model, loss_fn, images(1)[0], optimizer_fn=sgd)
    frozen, half = ([Mode.FULL, mode] for mode in (Mode.BIAS, Mode.channels(1 / 2, "out")))
    gap = step_memory(profile, half, lean=True).activations
    gap -= step_memory(profile, frozen, lean=True).activations
    # Three of six channels read up to three inputs: all there are.
    assert gap == 4 * 6 * 3 * 8 * 8


class ConvTwice(nn.Module):
    """A convolution that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(self.conv(self.stem(x))).mean((2, 3)))
        return out


def test_the_bias_of_a_layer_that_runs_twice_is_trained_without_its_input() -> None:
    model, batch = ConvTwice(), images(1)[0]
    profile = estimate_profile(model, loss_fn, batch, optimizer_fn=sgd)
    request = PlanRequest(profile, Budget(memory=1e9), np.ones(len(profile)))
    plan = POLICIES.make("bias").plan(request)
    predicted = step_memory(profile, plan.modes, lean=True).activations
    with untouched(model), plan_applied(plan, model):
        kept = kept_bytes(lambda: compute_loss(model, loss_fn, batch), besides=model)
        loss = compute_loss(model, loss_fn, batch)
        found = torch.autograd.grad(loss, [model.conv.bias])[0]
    exact = torch.autograd.grad(compute_loss(model, loss_fn, batch), [model.conv.bias])[0]
    assert abs(kept - predicted) <= 0.05 * kept + 100
    assert torch.allclose(found, exact, rtol=1e-5)


class OwnStatistics(nn.Module):
    """A norm of the user's own that assigns one buffer, writes the other, and draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 1, 1))
        self.register_buffer("square", torch.ones(4, 1, 1))
        self.conv = parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.5 * self.mean + 0.5 * x.mean((0, 2, 3), keepdim=True)[0]
            self.square.mul_(0.5).add_(0.5 * x.square().mean((0, 2, 3), keepdim=True)[0])
        y = (x - self.mean) / self.square.sqrt()
        out: Tensor = torch.relu(self.conv(torch.tanh(y)) * (1 + random.random()))
        return out


def test_a_recomputed_block_runs_as_it_ran_before() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), OwnStatistics(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 3)
    )  # fmt: skip
    twin, batch = copy.deepcopy(model), images(1)[0]
    profile = estimate_profile(model, loss_fn, batch, optimizer_fn=sgd)
    request = PlanRequest(profile, Budget(), np.ones(len(profile)))
    plan = POLICIES.make("full").plan(request)
    assert "1" in {block.module for block in profile.graph.blocks}
    ends = []
    for each, recomputed in ((model, ("1",)), (twin, ())):
        random.seed(4)
        with plan_applied(replace(plan, transforms=(Recomputation(recomputed),)), each):
            for _ in range(2):
                compute_loss(each, loss_fn, batch).backward()
        ends.append(random.random())
    assert ends[0] == ends[1]
    assert same_weights(weights_of(twin), model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_memory_counts_bits_of_a_rectifier_in_place_behind_an_instance_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(inplace=True),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 3),
    )  # fmt: skip
    batch = images(1)[0]
    profile = estimate_profile(model, loss_fn, batch, optimizer_fn=sgd)
    request = PlanRequest(profile, Budget(memory=1e9), np.ones(len(profile)))
    plan = POLICIES.make("full").plan(request)
    predicted = step_memory(profile, plan.modes, lean=True).activations
    with untouched(model), plan_applied(plan, model):
        kept = kept_bytes(lambda: compute_loss(model, loss_fn, batch), besides=model)
    assert abs(kept - predicted) <= 0.05 * kept + 100


def test_a_linear_layer_in_bias_mode_may_be_followed_by_a_rectifier_in_place() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    inputs = torch.randn(4, 5, 6)
    with lean(model, {"0": Mode.BIAS, "2": Mode.FULL}):
        model(inputs).sum().backward()
    found = model[0].bias.grad.clone()
    model.zero_grad()
    model(inputs).sum().backward()
    assert torch.allclose(found, model[0].bias.grad, rtol=1e-5)


class OfUnequalLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.relu(self.first(x)).unbind()
        out: Tensor = self.second(torch.stack([each.mean(0) for each in rows]))
        return out


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("budget", [Budget(), Budget(memory=1e6)])
def test_nested_tensors_are_refused_with_what_to_do(budget: Budget, layout: torch.layout) -> None:
    rows = [torch.randn(1 + n, 6) for n in range(4)]
    batch = torch.nested.nested_tensor(rows, layout=layout), torch.randint(3, (4,))
    model = OfUnequalLengths()
    with pytest.raises(ModelError, match=r"nested tensors.*to_padded_tensor"):
        ElasticTrainer(model, loss_fn, sgd, budget=budget).fit([batch])


class Forces(nn.Module):
    """An energy and its gradient, through layers that lean ones would replace."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU(),
            nn.Flatten(), nn.Linear(16, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, force.flatten(1)], dim=1)


def test_a_model_of_second_derivatives_trains_under_a_memory_budget_as_without() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 1, 8, 8), torch.randn(8, 65)) for _ in range(3)]
    model = Forces()
    plain = copy.deepcopy(model)
    for budget, each in ((Budget(), plain), (Budget(memory=1e8), model)):
        trainer = ElasticTrainer(each, nn.functional.mse_loss, sgd, budget=budget, policy="full")
        trainer.fit(batches)
    assert same_weights(weights_of(plain), model)
