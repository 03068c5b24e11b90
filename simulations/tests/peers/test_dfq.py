"""Gates that choose bits: what layers see, what moves the gates, and the published targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer_tasks import task_of
from small_models import chain, images, loss_fn, vectors
from torch import Tensor, nn

from fl_elastic.errors import ModelError
from fl_elastic_simulations.peers import PEERS
from fl_elastic_simulations.peers.dfq import Dfq, Gates, gated
from fl_elastic_simulations.peers.fractrain import bit_cost, rounded


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    return Dfq().prepare(model, loss_fn, images()[0])


def test_the_first_and_last_layer_have_no_gate_and_the_others_keep_their_names() -> None:
    names = [name for name, _ in net().named_parameters() if "bit_gate" in name]
    assert names == [f"{layer}.bit_gate.{each}" for layer in "25" for each in ("weight", "bias")]
    assert torch.equal(
        net().get_parameter("2.bit_gate.weight"), net().get_parameter("2.bit_gate.weight")
    )
    with pytest.raises(ModelError, match="has no gate: call prepare first"):
        with gated(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), 3.0):
            pass


def test_each_example_is_rounded_in_the_bits_of_its_own_choice() -> None:
    model, x = net(), torch.randn(6, 3, 8, 8)
    # The first channel's mean decides: examples choose unlike.
    gate: Any = model.get_submodule("2.bit_gate")
    seen: list[Tensor] = []
    hidden = torch.relu(model.get_submodule("0")(x))
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.zero_()
        middle = hidden.mean((2, 3))[:, 0].median()
        gate.weight[3, 0], gate.bias[3] = 1.0, -middle
    layer: Any = model.get_submodule("2")
    with gated(model, 3.0) as gates:
        # After the gate's own hook, so that it sees what the layer is given.
        handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        model(x)
        handle.remove()
    few, many = rounded(hidden, 3), rounded(hidden, 8)
    chosen = [
        bool(torch.allclose(each, y, atol=1e-6)) for each, y in zip(seen[0], many, strict=True)
    ]
    assert 0 < sum(chosen) < len(chosen)
    for each, took, y, z in zip(seen[0], chosen, few, many, strict=True):
        torch.testing.assert_close(each, z if took else y)
    assert gates.percent == 0.0
    assert torch.isfinite(gates.penalty()) and gates.percent > 0


def test_the_penalty_is_beta_times_the_cost_towards_the_target() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    both = (bit_cost(3, 6) + bit_cost(8, 8)) / 2
    for target, sign in ((100 * both + 0.01, -1.0), (100 * both, 1.0), (100 * both - 0.01, 1.0)):
        gates = Gates(target)
        gates.note(weights, 100)
        gates.note(weights, 300)
        assert float(gates.penalty()) == pytest.approx(sign * 1e-3 * 2 * both)
        assert gates.percent == pytest.approx(100 * both)
    gates.begin()
    gates.note(weights[:1], 100)
    assert float(gates.penalty()) == pytest.approx(-1e-3 * bit_cost(3, 6))


@pytest.mark.parametrize(("target", "fewer"), [(0.1, True), (50.0, False)])
def test_gates_are_pulled_to_the_target(target: float, fewer: bool) -> None:
    model = net()
    x = torch.randn(16, 3, 8, 8)
    gates_of = [p for n, p in model.named_parameters() if "bit_gate" in n]
    optimizer, percents = torch.optim.SGD(gates_of, lr=300.0), []
    with gated(model, target) as gates:
        for _ in range(30):
            optimizer.zero_grad()
            model(x)
            gates.penalty().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            percents.append(gates.percent)
    assert (percents[-1] < percents[0]) if fewer else (percents[-1] > percents[0])


def test_errors_are_rounded_in_the_bits_of_each_example() -> None:
    model = net()
    gate: Any = model.get_submodule("5.bit_gate")
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    errors: dict[str, Tensor] = {}
    model.get_submodule("6").register_full_backward_hook(
        lambda _, given, __: errors.update(above=given[0])
    )
    layer: Any = model.get_submodule("5")
    x = torch.randn(40, 3, 8, 8)
    with gated(model, 3.0):
        model(x).square().sum().backward()
    # The bias adds up the rounded errors of its outputs, of 64 levels.
    step = (errors["above"].max() - errors["above"].min()) / 63
    assert layer.bias.grad is not None
    off = (layer.bias.grad - errors["above"].sum(0)).abs()
    assert 0 < float(off.max()) < 40 * float(step)


@pytest.mark.parametrize("name", ["dfq", "fractrain_gated"])
def test_a_round_trains_weights_and_gates_and_counts_its_stage(name: str) -> None:
    peer, data = PEERS.make(name), vectors(4)
    model = peer.prepare(chain(), loss_fn, data[0])
    task = task_of(model, data)
    result = peer.train(task)
    assert result.steps == 4 and result.host_seconds == 4 * task.profile.full_step_seconds
    assert any("bit_gate" in each for each in result.update.deltas)
    assert set(result.update.deltas) == {n for n, _ in model.named_parameters()}
    assert set(task.memory) == {name}
    assert PEERS.make("fractrain_gated").targets == (1.5, 2.0, 2.5, 3.0)  # type: ignore[attr-defined]
    assert PEERS.make("dfq").targets == (3.0,)  # type: ignore[attr-defined]
