"""A plan in a training loop of one's own, against masked training, and what such a loop sends."""

from __future__ import annotations

import copy
import logging
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
import torch
from plain_loop import assert_weights, plain_steps
from small_models import conv_net
from torch import Tensor, nn

from fl_elastic.aggregation import PartialMean
from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.planning import Plan
from fl_elastic.planning.lean_layers import LeanLayers
from fl_elastic.training import (
    ElasticTrainer,
    ForwardOptions,
    Timing,
    TrainablePart,
    TrainerOptions,
    apply_plan,
    changed,
    plan_for,
)
from fl_elastic.training.changes import trained_parts
from fl_elastic.training.selection import SelectionState
from fl_elastic.update import Manifest, decode, encode

LOSS = nn.functional.cross_entropy


def batches(count: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(6, 3, 12, 12, generator=generator),
            torch.randint(0, 3, (6,), generator=generator),
        )
        for _ in range(count)
    ]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


def sgd(parameters: object) -> torch.optim.Optimizer:
    """Momentum and weight decay move whatever is not kept from it."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]


def total_bytes(model: nn.Module) -> float:
    return sum(4.0 * parameter.numel() for parameter in model.parameters())


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def own_loop(model: nn.Module, plan: Plan, data: list[Batch]) -> None:
    optimizer = sgd(model.parameters())
    with apply_plan(model, plan, optimizer):
        plain_steps(model, optimizer, data, LOSS)


def masked(model: nn.Module, plan: Plan, data: list[Batch]) -> None:
    """Full backward passes; what the plan does not train is written back after each step."""
    trained, parts = set(plan.trained_parameters), trained_parts([plan], model)
    frozen = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    names = {id(p): n for n, p in model.named_parameters()}
    for norm in frozen:
        if names[id(norm.weight)] not in trained:
            norm.eval()
    optimizer, before = sgd(model.parameters()), state_of(model)
    for inputs, targets in data:
        optimizer.zero_grad()
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                keep = torch.ones_like(parameter, dtype=torch.bool)
                if name in trained:
                    keep[:] = False
                    for axis, side in enumerate(parts.get(name, ())):
                        if side is not None:
                            shape = [1] * parameter.dim()
                            shape[axis] = -1
                            keep |= ~torch.from_numpy(side).reshape(shape)
                parameter.copy_(torch.where(keep, before[name], parameter))
    model.train()


@pytest.mark.parametrize("policy", ["elastic", "head", "bias", "tinytrain", "tinytrain_in", "full"])
def test_a_loop_under_a_plan_is_masked_training(policy: str) -> None:
    model, data = network().train(), batches()
    budget = Budget() if policy == "full" else Budget(uplink=0.3 * total_bytes(model))
    before = state_of(model)
    plan = plan_for(
        model, LOSS, data[:2], budget=budget, policy=policy, optimizer_fn=sgd,
    )  # fmt: skip
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    if policy.startswith("tinytrain"):
        assert plan.channels
    mine, reference = copy.deepcopy(model), copy.deepcopy(model)
    own_loop(mine, plan, data)
    masked(reference, plan, data)
    assert_weights(mine, reference, rtol=1e-4, atol=1e-6)
    assert all(p.requires_grad for p in mine.parameters())
    assert all(module.training for module in mine.modules())


def test_a_plan_that_needs_fewer_steps_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A trainer takes fewer steps by itself; a loop of one's own overruns its budget unless it is told."""
    model, data = network().train(), batches()
    with caplog.at_level(logging.WARNING, logger="fl_elastic"):
        assert plan_for(model, LOSS, data[:2], budget=Budget()).step_fraction == 1
        assert not caplog.records
        plan = plan_for(model, LOSS, data[:2], budget=Budget(speedup=1000))
    assert plan.step_fraction < 0.5
    (said,) = caplog.messages
    assert "Plan.step_fraction" in said and f"{plan.step_fraction:.1%}" in said


def of_half_the_bytes(model: nn.Module, data: list[Batch], policy: str) -> Plan:
    budget = Budget(uplink=0.5 * total_bytes(model))
    return plan_for(model, LOSS, data[:2], budget=budget, policy=policy, optimizer_fn=sgd)


@pytest.mark.parametrize("policy", ["elastic", "tinytrain"])
def test_what_it_changed_brings_the_server_to_the_same_model(policy: str) -> None:
    model, data = network().train(), batches()
    plan = of_half_the_bytes(model, data, policy)
    base = state_of(model)
    own_loop(model, plan, data)
    update = changed(model, base, plan, steps=4, num_examples=24, base_version=2)
    assert set(plan.trained_parameters) <= set(update.deltas)
    assert (update.num_examples, update.base_version) == (24, 2)
    manifest = Manifest.of(model)
    arrived = decode(encode(update, manifest), manifest)
    mean = PartialMean(manifest)
    mean.add(arrived)
    merged = mean.finish({name: value.numpy() for name, value in base.items()})
    for name, value in model.state_dict().items():
        if name not in plan.trained_parameters and value.is_floating_point():
            assert name in update.deltas or torch.equal(value, base[name])
        if value.is_floating_point():
            np.testing.assert_allclose(merged[name], value.numpy(), rtol=1e-5, atol=1e-6)


def test_without_an_optimiser_other_channels_are_as_before_on_leaving() -> None:
    model, data = network().train(), batches()
    plan = of_half_the_bytes(model, data, "tinytrain")
    base, optimizer = state_of(model), sgd(model.parameters())
    with apply_plan(model, plan):
        LOSS(model(data[0][0]), data[0][1]).backward()
        optimizer.step()
    for name, sides in trained_parts([plan], model).items():
        (axis,) = [axis for axis, side in enumerate(sides) if side is not None]
        still = torch.from_numpy(~sides[axis]).nonzero().flatten()
        now, before = model.state_dict()[name], base[name]
        assert torch.equal(now.index_select(axis, still), before.index_select(axis, still))


def test_an_error_inside_leaves_the_model_trainable_and_the_optimiser_free() -> None:
    model, data = network().train(), batches()
    plan = plan_for(model, LOSS, data[:2], budget=Budget(), policy="head")
    optimizer = sgd(model.parameters())
    with pytest.raises(KeyError), apply_plan(model, plan, optimizer):
        raise KeyError("mine")
    assert all(p.requires_grad for p in model.parameters())
    assert not optimizer._optimizer_step_post_hooks


def test_what_does_not_fit_is_said() -> None:
    model, data = network().train(), batches()
    plan = of_half_the_bytes(model, data, "tinytrain")
    with pytest.raises(PlanError, match="does not have"), apply_plan(conv_net("none"), plan):
        pass
    with (
        pytest.raises(PlanError, match="not chosen"),
        apply_plan(model, replace(plan, transforms=(LeanLayers(),))),
    ):
        pass
    with pytest.raises(TrainingError, match="needs 2 batches with examples, 1 were given"):
        plan_for(model, LOSS, data[:1], budget=Budget(speedup=2))
    with pytest.raises(TrainingError, match="batches is one batch"):
        plan_for(model, LOSS, data[0], budget=Budget(speedup=2))
    for loader in (torch.utils.data.DataLoader(data, batch_size=None), iter(data), None):
        with pytest.raises(TrainingError, match=rf"of type {type(loader).__name__}: pass a list"):
            plan_for(model, LOSS, loader, budget=Budget(speedup=2))  # type: ignore[arg-type]
    base = state_of(model)
    del base["0.weight"]
    with pytest.raises(TrainingError, match=r"base lacks '0\.weight'"):
        changed(model, base, plan, steps=1, num_examples=6)


@pytest.mark.parametrize("policy", ["elastic", "tinytrain", "head"])
def test_batches_without_examples_are_left_out_of_a_plan(policy: str) -> None:
    data = batches(2)
    empty = torch.zeros(0, 3, 12, 12), torch.zeros(0, dtype=torch.int64)
    ignored = data[0][0], torch.full((6,), -100)
    with_them = [empty, data[0], ignored, data[1]]
    options = TrainerOptions(timing=Timing(clock="cpu"))
    states = [SelectionState(), SelectionState()]
    plans = [
        plan_for(
            network(), LOSS, each, budget=Budget(), policy=policy, options=options, state=state
        )
        for each, state in zip((data, with_them), states, strict=True)
    ]
    assert plans[0].trained_parameters == plans[1].trained_parameters
    assert states[0].scores == states[1].scores
    with pytest.raises(TrainingError, match="none with an example"):
        plan_for(network(), LOSS, [empty, ignored], budget=Budget(), policy=policy)


@pytest.mark.parametrize("policy", ["full", "last_k", "elastic", "head"])
@pytest.mark.parametrize("place", ["7", "3"])
def test_an_own_loop_trains_above_the_cut_as_the_trainer_does(policy: str, place: str) -> None:
    model, data = network(), batches(2)
    options = TrainerOptions(part=TrainablePart(cut=place))
    plan = plan_for(
        model, LOSS, data, budget=Budget(), policy=policy, optimizer_fn=sgd, options=options
    )
    trainer = ElasticTrainer(model, LOSS, sgd, budget=Budget(), policy=policy, options=options)
    trained = trainer.fit(data).plan.trained_parameters
    assert plan.trained_parameters == trained
    allowed = {name for name, _ in model.named_parameters() if name >= place}
    assert set(plan.trained_parameters) <= allowed


def test_an_own_loop_leaves_a_kept_head_alone() -> None:
    options = TrainerOptions(part=TrainablePart(kept_head="7"))
    plan = plan_for(network(), LOSS, batches(2), budget=Budget(), policy="full", options=options)
    assert {name.split(".")[0] for name in plan.trained_parameters} == {"0", "1", "3"}


def test_steps_of_several_batches_cost_a_part_of_the_optimisers_time() -> None:
    plans = [
        plan_for(
            network(), LOSS, batches(2), budget=Budget(), policy="full", optimizer_fn=sgd,
            profile=None, options=TrainerOptions(accumulate=count, timing=Timing(clock="cpu")),
        )
        for count in (1, 1000)
    ]  # fmt: skip
    assert plans[0].predicted_step_bytes < plans[1].predicted_step_bytes


def test_an_own_loop_refuses_what_it_cannot_heed() -> None:
    with pytest.raises(PlanError, match="no group 'nowhere'"):
        plan_for(
            network(),
            LOSS,
            batches(2),
            budget=Budget(),
            options=TrainerOptions(part=TrainablePart(cut="nowhere")),
        )
    for name, options in {
        "proximal": TrainerOptions(proximal=0.1),
        "keep_statistics": TrainerOptions(part=TrainablePart(keep_statistics=True)),
        "forward": TrainerOptions(forward=ForwardOptions()),
    }.items():
        with pytest.raises(TrainingError, match=f"'{name}' determines how steps are taken"):
            plan_for(network(), LOSS, batches(2), budget=Budget(), options=options)


def test_a_full_plan_has_none_of_what_a_plan_may_change_in_a_step() -> None:
    plan = plan_for(network(), LOSS, batches(2), budget=Budget(), policy="head")
    changed_plan = replace(plan, transforms=(LeanLayers(everywhere=True, channels={"3": (0,)}),))
    usual = {each.name for each in fields(Plan) if each.default is not MISSING}
    full = changed_plan.full()
    for each in fields(Plan):
        if each.name in usual - {"layers"}:
            assert getattr(full, each.name) == each.default, each.name
    assert full.mask.all() and full.predicted_step_seconds == plan.full_step_seconds
    assert not full.channels
