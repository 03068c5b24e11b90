"""Frozen means frozen: gradients, weights, optimiser state and BatchNorm of what is not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from small_models import (
    Attention,
    Batch,
    Inception,
    Residual,
    TiedLinears,
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

from fl_elastic.budget import Budget
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning import Plan, PlanRequest
from fl_elastic.testing.probes import Snapshot
from fl_elastic.training.apply_plan import frozen_outside

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "chain": (chain, lambda: vectors()[0]),
    "group norm": (lambda: conv_net("group"), lambda: images()[0]),
    "no norm": (lambda: conv_net("none"), lambda: images()[0]),
    "residual": (Residual, lambda: images()[0]),
    "inception": (Inception, lambda: images()[0]),
    "attention": (Attention, lambda: vectors()[0]),
    "tied linears": (TiedLinears, lambda: vectors()[0]),
}


def plan_of(model: nn.Module, batch: Batch, mask: Iterable[bool]) -> Plan:
    profile = flat_profile(model, batch)
    request = PlanRequest(profile, Budget(), np.ones(len(profile)))
    return request.plan_of_mask("test", np.array(list(mask), dtype=bool))


@pytest.mark.parametrize("name", MODELS)
def test_selected_gradients_are_those_of_full_training_bit_for_bit(name: str) -> None:
    make, batch_of = MODELS[name]
    model, batch = make(), batch_of()
    full = deepcopy(model)
    torch.autograd.backward(loss_fn(full(batch[0]), batch[1]))
    groups = len(flat_profile(model, batch))
    rng = np.random.default_rng(0)
    masks = [np.arange(groups) == k for k in range(groups)]
    masks += [np.arange(groups) <= k for k in range(groups)]
    masks += [rng.random(groups) < 0.5 for _ in range(4)]
    for mask in masks:
        if not mask.any():
            continue
        plan = plan_of(model, batch, mask)
        with frozen_outside(plan, model):
            model.zero_grad(set_to_none=True)
            torch.autograd.backward(loss_fn(model(batch[0]), batch[1]))
            for parameter_name, parameter in model.named_parameters():
                expected = full.get_parameter(parameter_name).grad
                if parameter_name in plan.trained_parameters:
                    assert parameter.grad is not None and expected is not None
                    assert torch.equal(parameter.grad, expected)
                else:
                    assert parameter.grad is None


def optimizer_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in optimizer.state[parameter].items()
    }


@pytest.mark.parametrize("optimizer_fn", [sgd, adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("trained", [["11"], ["0"], ["11", "4", "1"]], ids=str)
def test_frozen_tensors_and_their_optimiser_state_do_not_move(
    optimizer_fn: OptimizerFn, trained: list[str]
) -> None:
    batches = images(3)
    model = conv_net()
    every = ["0", "1", "3", "4", "6", "7", "11"]
    trainer = trainer_of(model, batches[0], every, trained, optimizer_fn=optimizer_fn)
    trainer.fit(batches)
    optimizer = trainer.optimizer
    assert optimizer is not None
    before = weights_of(model)
    state = {name: optimizer_state(optimizer, p) for name, p in model.named_parameters()}
    assert all(state.values())
    trainer.fit(batches)
    for name, parameter in model.named_parameters():
        moved = name.split(".")[0] in trained
        assert torch.equal(parameter, before[name]) != moved, name
        now = optimizer_state(optimizer, parameter)
        same = [
            torch.equal(value, now[key]) if isinstance(value, Tensor) else value == now[key]
            for key, value in state[name].items()
        ]
        assert all(same) != moved, name


def test_a_stale_gradient_moves_nothing() -> None:
    batches = vectors(3)
    model = chain()
    clean = deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1000.0)
    before = weights_of(model)
    trainer_of(model, batches[0], ["6"]).fit(batches)
    trainer_of(clean, batches[0], ["6"]).fit(batches)
    frozen = [name for name in before if not name.startswith("6.")]
    assert same_weights(before, model, frozen)
    assert same_weights(weights_of(clean), model)
    assert not torch.equal(before["6.weight"], model.state_dict()["6.weight"])


def frozen_statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers() if name.startswith(("1.", "4."))}


@pytest.mark.parametrize("caller", ["loss", "hook", "nobody"])
def test_a_frozen_batch_norm_stays_in_eval_whoever_calls_train(caller: str) -> None:
    batches = images(4)
    model = conv_net()
    norms = [model.get_submodule(name) for name in ("1", "4", "7")]
    modes: list[tuple[bool, ...]] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if caller == "loss":
            model.train()
        modes.append(tuple(norm.training for norm in norms))
        return loss_fn(outputs, targets)

    def turn_on(module: nn.Module, _: Any) -> None:
        module.train()

    trainer = trainer_of(model, batches[0], ["11", "7"])
    trainer.loss_fn = loss
    if caller == "hook":
        model.register_forward_pre_hook(turn_on)
    before = frozen_statistics(model)
    moved = model.get_buffer("7.running_mean").clone()
    trainer.fit(batches)
    assert set(modes) >= {(False, False, True)}
    assert modes[-len(batches) :] == [(False, False, True)] * len(batches)
    now = dict(model.named_buffers())
    assert all(torch.equal(value, now[name]) for name, value in before.items())
    assert not torch.equal(moved, model.get_buffer("7.running_mean"))


def test_frozen_batch_norm_uses_its_running_statistics() -> None:
    model, batch = conv_net(), images()[0]
    reference = deepcopy(model).eval()(batch[0])
    with frozen_outside(plan_of(model, batch, [True] + [False] * 6), model):
        model.train()
        assert torch.equal(model(batch[0]), reference)
    assert not torch.equal(model(batch[0]), reference)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d, nn.SyncBatchNorm])
def test_every_norm_with_statistics_is_frozen(norm: Callable[..., nn.Module]) -> None:
    layer = norm(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten(), nn.Linear(4 * 36, 3))
    batch = images()[0]
    layer.eval()
    plan = plan_of(model, batch, [True, False, False])
    layer.train()
    with frozen_outside(plan, model):
        model.train()
        assert not layer.training
    assert layer.training and "train" not in vars(layer)


def test_flags_and_modes_are_restored_also_after_an_error() -> None:
    model, batch = conv_net(), images()[0]
    model[4].eval()
    model[0].bias.requires_grad_(False)
    plan = plan_of(model, batch, [True] + [False] * 6)
    before = Snapshot(model)
    with frozen_outside(plan, model):
        assert before.differences() != []
    assert before.differences() == []
    with pytest.raises(KeyError), frozen_outside(plan, model):
        model.train()
        raise KeyError("x")
    assert before.differences() == []
    assert model.train()[4].training


def test_blocks_may_follow_each_other_and_be_copied() -> None:
    model, batch = conv_net(), images()[0]
    plan = plan_of(model, batch, [True] + [False] * 6)
    with frozen_outside(plan, model):
        copied = deepcopy(model)
    copied.train()
    assert not copied[1].training and model[1].training
    with frozen_outside(plan, model):
        assert not model.train()[1].training
