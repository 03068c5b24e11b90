"""Few bits: the quantiser against a slow loop, what enters and leaves layers, and stages that go by the loss."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from peer_tasks import task_of
from small_models import images
from torch import nn

from fl_elastic_simulations.peers import fractrain
from fl_elastic_simulations.peers.base import LocalResult
from fl_elastic_simulations.peers.fractrain import FracTrain, bit_cost, quantised, rounded


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_values_are_rounded_to_the_nearest_of_so_many_levels(bits: int, seed: int) -> None:
    torch.manual_seed(seed)
    values = torch.randn(4, 30) * 10 ** (seed - 2)
    found = rounded(values, bits)
    levels = torch.linspace(float(values.min()), float(values.max()), 2**bits)
    slow = torch.stack([levels[(levels - each).abs().argmin()] for each in values.flatten()])
    torch.testing.assert_close(found.flatten(), slow, rtol=1e-5, atol=1e-6 * 10 ** (seed - 1))
    assert len(found.unique()) <= 2**bits


def test_rounding_at_random_keeps_the_mean() -> None:
    torch.manual_seed(0)
    values = torch.tensor([0.0, 0.3, 0.8, 3.0])
    mean = torch.stack([rounded(values, 2, stochastic=True) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, values, rtol=0, atol=0.04)
    assert torch.equal(rounded(torch.ones(5), 4), torch.ones(5))


def test_the_published_costs() -> None:
    assert bit_cost(8, 8) == 1 / 16
    assert bit_cost(3, 6) == (9 + 36) / (3 * 1024)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def test_inner_layers_see_few_levels_and_their_gradients_are_of_rounded_errors() -> None:
    model, x = net(), torch.randn(5, 3, 8, 8)
    seen: dict[str, torch.Tensor] = {}
    errors: dict[str, torch.Tensor] = {}
    with quantised(model, 3, 4) as names:
        assert names == ["2", "5"]
        for name in ("0", "2", "5", "7"):
            layer = model.get_submodule(name)
            layer.register_forward_hook(
                lambda _, given, __, name=name: seen.update({name: given[0]})
            )
            layer.register_full_backward_hook(
                lambda _, __, out, name=name: errors.update({name: out[0]})
            )
        model(x).square().sum().backward()
    assert all(len(seen[name].unique()) <= 8 for name in names)
    assert len(seen["0"].unique()) > 100 and len(seen["7"].unique()) > 8
    # What a layer's weight is moved by is the product of the rounded error and the rounded input.
    error = torch.zeros_like(model[5].weight)
    error += errors["5"].T @ seen["5"]
    coarse = model[5].weight.grad
    assert coarse is not None and (coarse - error).abs().max() < error.abs().max()
    assert len((model(x) - net()(x)).unique()) == 1, "hooks are left behind"


def test_the_weight_gradient_is_that_of_a_slow_reference() -> None:
    """Gradients rounded to very many levels are those of the rounded inputs alone."""
    model, x = net(), torch.randn(5, 3, 8, 8)
    with quantised(model, 3, 20):
        model(x).square().sum().backward()
    slow = net()
    hidden = slow[1](slow[0](x))
    hidden = hidden + (rounded(hidden, 3) - hidden).detach()
    hidden = slow[4](slow[3](slow[2](hidden)))
    hidden = hidden + (rounded(hidden, 3) - hidden).detach()
    slow[7](slow[6](slow[5](hidden))).square().sum().backward()
    for (name, found), expected in zip(model.named_parameters(), slow.parameters(), strict=True):
        scale = float(expected.grad.abs().max())
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=2e-4 * scale, msg=name)


def test_stages_follow_the_losses_of_the_clients_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    bits: list[tuple[int, int]] = []
    peer, task = FracTrain(), task_of(net(), images(3))

    def train(*_: object) -> LocalResult:
        return replace(result, loss=next(losses))

    real = quantised

    def noting(model: nn.Module, forward_bits: int, gradient_bits: int) -> object:
        bits.append((forward_bits, gradient_bits))
        return real(model, forward_bits, gradient_bits)

    result = peer.local_training(replace(task, model=deepcopy(task.model), memory={}))
    monkeypatch.setattr(fractrain, "train_mask", train)
    monkeypatch.setattr(fractrain, "quantised", noting)
    memory: dict[str, object] = {}
    for _ in range(7):
        peer.local_training(replace(task, memory=memory))
    assert bits == [(3, 6)] * 6 + [(4, 6)]
    assert np.isfinite(result.loss) and result.update.deltas
