"""Neurons at rest: frozen rows stay to the bit, training is that of a slow masked loop, memory lasts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import assert_weights, plain_steps
from small_models import Batch, adam, flat_profile, images, loss_fn, sgd
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.methods.neurons.layers import NeuronLayers
from fl_elastic.methods.neurons.policy import NeqPolicy, NeuronPolicy
from fl_elastic.methods.neurons.rows import neuron_layers
from fl_elastic.methods.neurons.scotti import ScottiPolicy
from fl_elastic.methods.neurons.velocity_policy import VelocityPolicy
from fl_elastic.planning import Plan, PlanRequest, Policy
from fl_elastic.state.codec import from_archive, to_archive
from fl_elastic.training import ElasticTrainer, SelectionState, Timing, TrainerOptions, apply_plan
from fl_elastic.update import decode, encode
from fl_elastic.update.partial import trained_part


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3),
    )  # fmt: skip


LAYERS = {"0": 8, "1": 8, "3": 8, "4": 8, "6": 12, "9": 10}


class Rows(NeqPolicy):
    """Trains the rows that it is given, layer by layer; a layer without an entry is frozen."""

    def __init__(self, rows: dict[str, list[int]]) -> None:
        super().__init__()
        self.rows = rows

    def choose(self, request: PlanRequest, layers: Any) -> dict[int, Any]:
        """Return the rows."""
        return {
            group: np.isin(np.arange(layer.neurons), self.rows.get(layer.name, []))
            for group, layer in layers.items()
        }


ROWS = {
    "everywhere": {n: list(range(1, size, 2)) for n, size in LAYERS.items()},
    "above": {"4": [0, 7], "6": [1, 2, 9], "9": list(range(10))},
    "head alone": {},
}


def trainer_of(model: nn.Module, policy: str | Policy, batches: list[Batch], **more: Any) -> Any:
    return ElasticTrainer(
        model, loss_fn, more.pop("optimizer_fn", sgd), budget=more.pop("budget", Budget()), policy=policy,
        profile=flat_profile(model, batches[0]),
        options=TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False)), **more,
    )  # fmt: skip


def masks_of(model: nn.Module, rows: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return which entries of each parameter train, as a full mask."""
    found = {}
    for name, parameter in model.named_parameters():
        mask = torch.ones_like(parameter, dtype=torch.bool)
        layer = name.partition(".")[0]
        if layer in LAYERS:
            mask[:] = False
            mask[rows.get(layer, [])] = True
        found[name] = mask
    return found


def published_loop(
    model: nn.Module, masks: dict[str, Tensor], batches: list[Batch], buffers: dict[str, Tensor]
) -> None:
    """Weight decay, mask, momentum, mask, step: everything dense, as the published optimiser has it."""
    for inputs, targets in batches:
        model.train()
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d) and not masks[f"{name}.weight"].any():
                module.eval()
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                gradient = (parameter.grad + 0.01 * parameter) * masks[name]
                buffer = buffers.setdefault(name, torch.zeros_like(parameter))
                buffer.mul_(0.9).add_(gradient).mul_(masks[name])
                parameter.sub_(0.05 * buffer)


@pytest.mark.parametrize("kind", ROWS)
def test_training_is_that_of_the_published_masked_loop(kind: str) -> None:
    model, batches = net(), images(4)
    slow, buffers = copy.deepcopy(model), dict[str, Tensor]()
    trainer = trainer_of(model, Rows({n: list(range(s)) for n, s in LAYERS.items()}), batches)
    everything = {name: torch.ones_like(p, dtype=torch.bool) for name, p in slow.named_parameters()}
    # Momentum from a fit that trained everything is there to be erased.
    trainer.fit(batches)
    published_loop(slow, everything, batches, buffers)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.planner.policy = Rows(ROWS[kind])
    masks = masks_of(model, ROWS[kind])
    for _ in range(2):
        trainer.fit(batches)
        published_loop(slow, masks, batches, buffers)
    assert trainer.optimizer is not None
    assert_weights(model, slow, rtol=1e-4, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[~masks[name]], before[name][~masks[name]])
        assert (
            not torch.equal(parameter[masks[name]], before[name][masks[name]])
            or not masks[name].any()
        )
        momentum = trainer.optimizer.state[parameter]["momentum_buffer"]
        assert not momentum[~masks[name]].any()
        torch.testing.assert_close(momentum, buffers[name], rtol=1e-3, atol=1e-6)
    # What thaws begins anew, as it does there.
    trainer.planner.policy = Rows({n: list(range(s)) for n, s in LAYERS.items()})
    trainer.fit(batches)
    published_loop(slow, everything, batches, buffers)
    assert_weights(model, slow, rtol=1e-4, atol=1e-6)


def test_other_state_of_frozen_rows_stays_and_what_fails_changes_nothing() -> None:
    model, batches = net(), images(3)
    trainer = trainer_of(
        model, Rows({n: list(range(s)) for n, s in LAYERS.items()}), batches, optimizer_fn=adam
    )
    trainer.fit(batches)
    trainer.planner.policy = Rows(ROWS["everywhere"])
    masks = masks_of(model, ROWS["everywhere"])
    optimizer = trainer.optimizer
    before = {
        n: {k: torch.clone(v) for k, v in optimizer.state[p].items()}
        for n, p in model.named_parameters()
    }
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    broken = [*batches[:2], (torch.full_like(batches[0][0], torch.nan), batches[0][1])]
    with pytest.raises(TrainingError, match="loss is nan"):
        trainer.fit(broken)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert all(torch.equal(v, before[name][k]) for k, v in optimizer.state[parameter].items())
    trainer.fit(batches)
    for name, parameter in model.named_parameters():
        state, frozen = optimizer.state[parameter], ~masks[name]
        assert torch.equal(parameter[frozen], weights[name][frozen])
        assert not state["exp_avg"][frozen].any()
        assert torch.equal(state["exp_avg_sq"][frozen], before[name]["exp_avg_sq"][frozen])
        assert not torch.equal(state["exp_avg_sq"], before[name]["exp_avg_sq"])


def test_an_optimiser_that_begins_by_rows_keeps_nothing_of_frozen_ones() -> None:
    model, batches = net(), images(2)
    trainer = trainer_of(model, Rows(ROWS["everywhere"]), batches, optimizer_fn=adam)
    trainer.fit(batches)
    masks = masks_of(model, ROWS["everywhere"])
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert not trainer.optimizer.state[parameter][moment][~masks[name]].any()


def test_a_loop_of_ones_own_keeps_rows_and_erases_momentum() -> None:
    model, batches = net(), images(3)
    trainer = trainer_of(model, Rows(ROWS["everywhere"]), batches)
    plan: Plan = trainer.fit(batches).plan
    masks = masks_of(model, ROWS["everywhere"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = sgd(model.parameters())
    with apply_plan(model, plan, optimizer):
        plain_steps(model, optimizer, batches, loss_fn)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[~masks[name]], before[name][~masks[name]])
        assert not optimizer.state[parameter]["momentum_buffer"][~masks[name]].any()


def test_the_update_says_which_neurons_it_is_of() -> None:
    model, batches = net(), images(2)
    trainer = trainer_of(model, Rows(ROWS["above"]), batches)
    trainer.fit(batches)
    update = trainer.update()
    packed = encode(update, trainer.manifest)
    again = decode(packed, trainer.manifest)
    for name, rows in {
        "4.weight": [0, 7],
        "4.bias": [0, 7],
        "6.weight": [1, 2, 9],
        "6.bias": [1, 2, 9],
    }.items():
        part = trained_part(again, name)
        assert part is not None
        assert np.flatnonzero(part.reshape(len(part), -1)[:, 0]).tolist() == rows
    assert "0.weight" not in again.deltas and "1.running_mean" not in again.deltas
    assert trained_part(again, "9.weight") is None and trained_part(again, "11.bias") is None


def test_the_backward_pass_ends_at_the_deepest_neuron_that_trains() -> None:
    model, batches = net(), images(2)
    seen: list[str] = []
    trainer = trainer_of(model, Rows({"6": [3]}), batches)
    for name, module in model.named_children():
        module.register_full_backward_pre_hook(lambda *_, name=name: seen.append(name))
    trainer.fit(batches[:1])
    assert "6" in seen and not {"0", "1", "3", "4"} & set(seen)


def rounds(policy: NeuronPolicy, count: int, **more: Any) -> list[Any]:
    model, batches, state = net(), images(4), SelectionState()
    plans = []
    for _ in range(count):
        # As where a process lives for one message: nothing lasts but weights and the state on disk.
        state = from_archive(SelectionState, to_archive(state))
        trainer = trainer_of(model, policy, batches, state=state, **more)
        plans.append((trainer.fit(batches).plan, state.memory))
    return plans


def test_the_first_fits_train_everything_and_later_ones_what_moves() -> None:
    plans = rounds(NeqPolicy(eps=0.003), 4)
    kinds = [{mode.kind for mode in plan.modes} for plan, _ in plans]
    assert kinds[:2] == [{"full"}, {"full"}]
    assert all("channels" in each for each in kinds[2:])
    assert [memory.facts["count"] for _, memory in plans] == [0, 1, 2, 3]
    for plan, memory in plans[2:]:
        speeds, at = np.abs(memory.arrays["velocity"]), 0
        for name in reversed(LAYERS):
            group = next(i for i, g in enumerate(plan.groups) if g.name == name)
            mine = speeds[at : at + LAYERS[name]] >= 0.003
            at += LAYERS[name]
            said = plan.channels.get(name, np.arange(LAYERS[name]) if plan.mask[group] else ())
            assert list(said) == np.flatnonzero(mine).tolist()
        assert at == len(speeds)


@pytest.mark.parametrize("share", [0.05, 0.4])
def test_velocity_keeps_a_budget_of_parameters_in_every_fit(share: float) -> None:
    model, batches = net(), images(1)
    layers = {
        layer.name: layer
        for layer in neuron_layers(flat_profile(model, batches[0])).values()
        if not layer.is_norm
    }
    assert (
        layers["3"].parameters == 9
        and layers["0"].parameters == 28
        and layers["6"].parameters == 37
    )
    total = sum(layer.neurons * layer.parameters for layer in layers.values())
    dearest = max(layer.parameters for layer in layers.values())
    for plan, memory in rounds(VelocityPolicy(share=share), 4):
        modes = {group.name: mode for group, mode in zip(plan.groups, plan.modes, strict=True)}
        assert modes["1"].is_frozen and modes["4"].is_frozen and modes["11"].kind == "full"
        spent = sum(
            layer.parameters
            * len(plan.channels.get(name, range(0 if modes[name].is_frozen else layer.neurons)))
            for name, layer in layers.items()
        )
        assert spent <= share * total
        if memory.facts["count"] < 2:
            # By chance there are no ties: one more would not have fitted.
            assert spent + dearest > share * total


def test_later_plans_of_a_fit_draw_the_same_neurons() -> None:
    model, batches = net(), images(2)
    trainer = trainer_of(model, VelocityPolicy(share=0.3), batches)
    trainer.fit(batches)
    first = trainer.planner.plan(1.0).channels
    assert first == trainer.planner.plan(1.0).channels != {}
    # And the next fit others.
    trainer.fit(batches)
    assert trainer.planner.plan(1.0).channels != first


def test_the_threshold_is_raised_until_the_measured_step_fits() -> None:
    policy = ScottiPolicy(eps=0.0)
    free = [plan for plan, _ in rounds(policy, 3)]
    plans = [plan for plan, _ in rounds(policy, 3, budget=Budget(uplink=1500.0))]
    sent = PlanRequest(flat_profile(net(), images(1)[0]), Budget(), np.zeros(7)).uplink_bytes
    model, batches = net(), images(2)
    trainer = trainer_of(model, policy, batches, budget=Budget(uplink=1500.0))
    first = trainer.fit(batches).plan
    again = trainer.planner.plan(1.0)
    assert again.transforms == first.transforms
    assert again.transform(NeuronLayers) is not None
    for plan, other in zip(plans, free, strict=True):
        assert 1300 < sent(plan.modes) <= 1500 < sent(other.modes)
    assert "channels" in {mode.kind for mode in plans[0].modes}


def test_the_threshold_descends_the_gradient_that_steps_tell() -> None:
    model, batches, state = net(), images(3), SelectionState()
    slow = copy.deepcopy(model)
    policy = ScottiPolicy(eps=0.05, eps_rate=0.5)
    trainer_of(model, policy, batches, state=state).fit(batches)
    # By hand: the learning rate times the gradient along the momentum, over layers of neurons.
    optimizer, eps, moving = sgd(slow.parameters()), 0.05, 0.0
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(slow(inputs), targets).backward()
        gradient = 0.0
        for name, parameter in slow.named_parameters():
            before = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if before is not None and name.partition(".")[0] in LAYERS:
                assert parameter.grad is not None
                gradient += 0.05 * float((before * parameter.grad).sum())
        moving = 0.9 * moving + gradient
        eps = max(eps - 0.5 * moving, 0.0)
        optimizer.step()
    assert eps != 0.05
    assert state.memory.facts["eps"] == pytest.approx(eps, rel=1e-3, abs=1e-6)


class ScottiRows(ScottiPolicy):
    """Learns the threshold while it trains the rows that it is given."""

    def choose(self, request: PlanRequest, layers: Any) -> dict[int, Any]:
        """Return every other row."""
        return Rows(ROWS["everywhere"]).choose(request, layers)


def test_frozen_neurons_have_no_say_in_the_threshold() -> None:
    model, batches, state = net(), images(3), SelectionState()
    slow, buffers = copy.deepcopy(model), dict[str, Tensor]()
    masks = masks_of(slow, ROWS["everywhere"])
    trainer_of(model, ScottiRows(eps_rate=1.0), batches, state=state).fit(batches)
    moving = 0.0
    for batch in batches:
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        published_loop(slow, masks, [batch], buffers)
        gradient = 0.0
        for name, parameter in slow.named_parameters():
            if before and name.partition(".")[0] in LAYERS:
                assert parameter.grad is not None
                gradient += 0.05 * float((before[name] * parameter.grad).sum())
        moving = 0.9 * moving + gradient
    assert moving != 0
    assert state.memory.facts["eps_momentum"] == pytest.approx(moving, rel=1e-3, abs=1e-6)


def test_a_fit_that_fails_is_not_remembered_and_the_same_model_is_no_observation() -> None:
    model, batches, state = net(), images(3), SelectionState()
    trainer = trainer_of(model, "neq", batches, state=state)
    trainer.fit(batches)
    memory = state.memory
    broken = [batches[0], (torch.full_like(batches[0][0], torch.nan), batches[0][1])]
    with pytest.raises(TrainingError):
        trainer.fit(broken)
    assert state.memory is memory and memory.facts["count"] == 0
    weights = copy.deepcopy(model.state_dict())
    trainer.fit(batches)
    assert state.memory.facts["count"] == 1
    model.load_state_dict(weights)
    trainer.fit(batches)
    assert state.memory.facts["count"] == 1


def test_what_is_kept_stays_within_its_bytes() -> None:
    model, batches = net(), images(2)
    kept = {}
    for limit in (8 << 20, 12_000, 4_000):
        state = SelectionState()
        trainer_of(model, NeqPolicy(memory_bytes=limit), batches, state=state).fit(batches)
        kept[limit] = state.memory
        assert 0 < state.memory.nbytes - 3 * 8 * sum(LAYERS.values()) <= limit
    assert kept[4_000].facts["width"] < kept[8 << 20].facts["width"]
    with pytest.raises(PlanError, match="memory_bytes is 900"):
        trainer_of(model, NeqPolicy(memory_bytes=900), batches).fit(batches)


def test_another_policys_memory_is_not_taken_up() -> None:
    model, batches, state = net(), images(2), SelectionState()
    trainer_of(model, "neq", batches, state=state).fit(batches)
    trainer_of(model, "scotti", batches, state=state).fit(batches)
    assert (state.memory.owner, state.memory.facts["count"]) == ("scotti", 0)


@pytest.mark.parametrize("norm", [False, True])
def test_a_model_without_neurons_is_refused(norm: bool) -> None:
    between = nn.LayerNorm(192) if norm else nn.Identity()
    model = nn.Sequential(nn.Flatten(), between, nn.Linear(192, 3))
    with pytest.raises(PlanError, match="none besides its head"):
        trainer_of(model, "neq", images(1)).fit(images(1))
