"""A plan is trained as it says: modes, lean layers, recomputed blocks, kept channels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peak_bytes import peak_bytes
from small_models import adam, images, loss_fn, sgd, weights_of
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.groups import Mode
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning import Needs, Plan, PlanRequest, Policy
from fl_elastic.planning.lean_layers import LeanLayers
from fl_elastic.planning.recompute import Recomputation
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.memory import step_memory
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic.training.apply_plan import plan_applied


class Block(nn.Module):
    """An inverted residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 1, bias=False), nn.BatchNorm2d(2 * channels), nn.ReLU6(),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels, bias=False),
            nn.BatchNorm2d(2 * channels), nn.ReLU6(),
            nn.Conv2d(2 * channels, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        Block(8), Block(8), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def graph_of(model: nn.Module) -> BackwardGraph:
    with untouched(model):
        return trace_step(model, loss_fn, images()[0]).graph


def plan_of(
    graph: BackwardGraph,
    modes: dict[str, Mode],
    *,
    lean: bool = False,
    channels: dict[str, tuple[int, ...]] | None = None,
    recomputed: tuple[str, ...] = (),
) -> Plan:
    chosen = tuple(modes.get(group.name, Mode.FROZEN) for group in graph.groups)
    transforms = LeanLayers(everywhere=lean, channels=channels or {}), Recomputation(recomputed)
    return Plan(
        "test", graph.groups, chosen, 1.0, 1.0, 0.1, 1.0, 0.0, layers=graph.group_layers,
        transforms=transforms,
    )  # fmt: skip


def gradients(model: nn.Module, plan: Plan, graph: BackwardGraph) -> dict[str, Tensor]:
    inputs, targets = images()[0]
    model.zero_grad(set_to_none=True)
    with plan_applied(plan, model):
        loss_fn(model(inputs), targets).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def kept_bytes(model: nn.Module, plan: Plan, graph: BackwardGraph) -> int:
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs, targets = images()[0]
    with plan_applied(plan, model), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_fn(model(inputs), targets)
        del inputs
        assert loss.requires_grad
    return sum(seen.values())


FEW = {"10": Mode.FULL, "5.body.0": Mode.FULL, "4.body.3": Mode.FULL}
NORMS = FEW | {"5.body.4": Mode.FULL, "1": Mode.FULL}


@pytest.mark.parametrize("modes", [FEW, NORMS], ids=["convolutions", "with norms"])
@pytest.mark.parametrize("recomputed", [(), ("5",), ("4", "5")], ids=["stored", "one", "two"])
@pytest.mark.parametrize("lean", [False, True])
def test_exact_modes_have_the_gradients_of_plain_torch(
    modes: dict[str, Mode], lean: bool, recomputed: tuple[str, ...]
) -> None:
    model = net().train()
    graph = graph_of(model)
    expected = gradients(copy.deepcopy(model), plan_of(graph, modes), graph)
    found = gradients(model, plan_of(graph, modes, lean=lean, recomputed=recomputed), graph)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_recomputed_block_moves_running_statistics_once() -> None:
    models = [net().train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    graph = graph_of(models[0])
    for model, recomputed in zip(models, ((), ("4", "5")), strict=True):
        gradients(model, plan_of(graph, NORMS, recomputed=recomputed), graph)
    for (name, one), other in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert all(n.momentum == 0.1 for n in models[1].modules() if isinstance(n, nn.BatchNorm2d))


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("group", ["6", "5.body.0", "5.body.3"])
def test_channel_gradients_are_the_mask_times_the_dense_ones(group: str, axis: Any) -> None:
    model = net().double().train()
    inputs, targets = images()[0]
    graph = graph_of(net())
    channels = (1, 4, 6)
    modes = {"10": Mode.FULL, group: Mode.channels(0.4, axis=axis)}
    found = {}
    for plan in (
        plan_of(graph, {"10": Mode.FULL, group: Mode.FULL}),
        plan_of(graph, modes, channels={group: channels}),
    ):
        with plan_applied(plan, model):
            model.zero_grad(set_to_none=True)
            loss_fn(model(inputs.double()), targets).backward()
            found[len(found)] = model.get_parameter(f"{group}.weight").grad.clone()  # type: ignore[union-attr]
    dimension = 0 if axis == "out" or group == "5.body.3" else 1
    mask = torch.zeros_like(found[0])
    mask.index_fill_(dimension, torch.tensor(channels), 1.0)
    torch.testing.assert_close(found[1], mask * found[0], rtol=1e-12, atol=1e-14)


PLANS = {
    "everything": ({group: Mode.FULL for group in ("10", "6", "5.body.7", "5.body.6", "0", "1")}, True),
    "few": (FEW, True),
    "few plain": (FEW, False),
    "norms": (NORMS, True),
    "channels": ({"10": Mode.FULL, "6": Mode.channels(0.5), "5.body.3": Mode.channels(0.25, axis="out")}, True),
    "filtered": ({"10": Mode.FULL, "6": Mode.filtered(2), "4.body.0": Mode.filtered(2, inputs=True)}, True),
    "bias": ({"10": Mode.FULL, "6": Mode.BIAS}, True),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_predicted_bytes_are_the_bytes_that_are_kept(case: str) -> None:
    modes, lean = PLANS[case]
    model = net().train()
    profile = profile_model(model, loss_fn, images()[0], clock="cpu")
    graph = profile.graph
    channels = {}
    for name, mode in modes.items():
        if mode.kind == "channels":
            shape = model.get_parameter(f"{name}.weight").shape
            channels[name] = tuple(range(mode.channel_count(shape[0 if mode.axis == "out" else 1])))
    plan = plan_of(graph, modes, lean=lean, channels=channels)
    predicted = step_memory(profile, plan.modes, lean=lean).activations
    kept = kept_bytes(model, plan, graph)
    # Trained norms also keep their batch's mean and deviation: a few floats each.
    assert abs(kept - predicted) <= 0.02 * kept + 2_000, (kept, predicted)


def test_lean_layers_keep_far_less_than_plain_ones() -> None:
    model = net().train()
    graph = graph_of(model)
    plain, lean = (
        kept_bytes(model, plan_of(graph, FEW, lean=lean), graph) for lean in (False, True)
    )
    assert lean * 4 < plain


class ByChannels(Policy):
    """Trains the head, and some channels of one layer; others from the second plan on."""

    needs = Needs(importance=True)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of the layer named 6 by input channels."""
        modes = [
            Mode.FULL if name == "10" else Mode.channels(0.5) if name == "6" else Mode.FROZEN
            for name in request.profile.group_names
        ]
        return request.plan("by channels", modes)


@pytest.mark.parametrize("optimizer_fn", [sgd, adam])
def test_channels_that_are_not_trained_stay_where_they_are(optimizer_fn: Any) -> None:
    model = net()
    trainer = ElasticTrainer(
        model, loss_fn, optimizer_fn, budget=Budget(),
        options=TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False, clock="cpu")),
    )  # fmt: skip
    # A first fit of everything leaves momentum in every channel.
    trainer.fit(images(3))
    before = weights_of(model)
    trainer.planner.policy = ByChannels()
    report = trainer.fit(images(3))
    channels = list(report.plan.channels["6"])
    assert len(channels) == 4
    moved = (weights_of(model)["6.weight"] != before["6.weight"]).any(dim=(0, 2, 3))  # type: ignore[call-overload]
    assert moved.nonzero().flatten().tolist() == channels
    delta = trainer.update().deltas["6.weight"]
    assert np.flatnonzero(np.abs(delta).sum(axis=(0, 2, 3))).tolist() == channels


def profile_of(model: nn.Module) -> CostProfile:
    return profile_model(model.train(), loss_fn, images()[0], optimizer_fn=sgd, clock="cpu")


def memory_budgets(profile: CostProfile, shares: Sequence[float]) -> list[float]:
    whole = step_memory(profile, [Mode.FULL] * len(profile)).total
    return [whole * share for share in shares]


def peaks(model: nn.Module, plan: Plan, graph: BackwardGraph, folder: Path) -> tuple[int, int]:
    """Return what one inference and one step up to all gradients take at the most."""
    inputs, targets = images()[0]

    def step() -> None:
        compute_loss(model, loss_fn, (inputs, targets)).backward()  # type: ignore[no-untyped-call]

    with untouched(model), torch.no_grad():
        inference = peak_bytes(lambda: model.eval()(inputs), folder)
    with untouched(model), plan_applied(plan, model):
        return inference, peak_bytes(step, folder)


@pytest.mark.parametrize("policy", ["full", "elastic", "joint", "last_k", "gradient_filter"])
def test_a_memory_budget_is_held_in_training(policy: str, tmp_path: Path) -> None:
    model = net()
    profile = profile_of(model)
    for memory in memory_budgets(profile, (0.9, 0.5, 0.3)):
        trainer = ElasticTrainer(
            copy.deepcopy(model), loss_fn, sgd, budget=Budget(memory=memory), policy=policy,
            profile=profile,
            options=TrainerOptions(
                full_update_every=0, timing=Timing(closed_loop=False, clock="cpu")
            ),
        )  # fmt: skip
        try:
            plan = trainer.fit(images(2)).plan
        except ValueError as refusal:
            assert policy == "full" and "bytes for a step at the least" in str(refusal)
            continue
        assert plan.predicted_step_bytes <= memory and plan.lean
        weights = 4 * sum(
            p.numel() for n, p in model.named_parameters() if n in plan.trained_parameters
        )
        inference, step = peaks(trainer.model, plan, profile.graph, tmp_path)
        # A copy of what is trained and momentum besides.
        assert step + 2 * weights - inference <= memory * 1.02 + 2_000
