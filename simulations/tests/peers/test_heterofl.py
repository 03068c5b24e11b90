"""HeteroFL: a round of a wide and a narrow client by hand, rates by time."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from peer_tasks import RATE, assert_close, by_hand, known_costs, merged, task_of, weights
from small_models import vectors
from torch import Tensor, nn

from fl_elastic.errors import BudgetError
from fl_elastic_simulations.peers import PEERS, heterofl
from fl_elastic_simulations.peers.heterofl import RATES, affordable_rate


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def narrow_by_hand(model: nn.Sequential, batches: list[Any], kept: list[int]) -> dict[str, Tensor]:
    """The narrow client's round with explicit slices and the scaler, without an optimiser."""
    w1, b1 = model[0].weight[kept].detach().clone(), model[0].bias[kept].detach().clone()
    w2, b2 = model[2].weight[:, kept].detach().clone(), model[2].bias.detach().clone()
    tensors = [w1, b1, w2, b2]
    for inputs, targets in batches:
        for tensor in tensors:
            tensor.requires_grad_(True)
        hidden = torch.relu(inputs @ w1.T + b1) * 8 / len(kept)
        loss = nn.functional.cross_entropy(hidden @ w2.T + b2, targets)
        gradients = torch.autograd.grad(loss, tensors)
        with torch.no_grad():
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor -= RATE * gradient
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    return {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}


def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each client of the peer train half of the channels."""
    monkeypatch.setattr(heterofl, "RATES", (0.5,))


def window_of(update: Any) -> list[int]:
    return np.flatnonzero(update.parts["0.weight"][0]).tolist()


def test_each_element_is_the_mean_of_those_who_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wide, small = two_layers(), vectors(3, seed=1), vectors(3, size=4, seed=2)
    profile, peer = known_costs(model, wide[0]), PEERS.make("heterofl")
    results = [peer.train(task_of(deepcopy(model), wide, profile=profile))]
    half(monkeypatch)
    results.append(peer.train(task_of(deepcopy(model), small, profile=profile)))
    kept = [0, 1, 2, 3]
    assert window_of(results[1].update) == kept
    whole = by_hand(model, wide, ["0.weight", "0.bias", "2.weight", "2.bias"], 3)
    narrow = narrow_by_hand(model, small, kept)
    # Each client alike, however many examples it has.
    expected = {name: value.clone() for name, value in whole.items()}
    expected["0.weight"][kept] = (whole["0.weight"][kept] + narrow["0.weight"]) / 2
    expected["0.bias"][kept] = (whole["0.bias"][kept] + narrow["0.bias"]) / 2
    expected["2.weight"][:, kept] = (whole["2.weight"][:, kept] + narrow["2.weight"]) / 2
    expected["2.bias"] = (whole["2.bias"] + narrow["2.bias"]) / 2
    assert_close(merged(peer, model, results), expected)


def test_what_no_one_holds_keeps_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    half(monkeypatch)
    model, peer = two_layers(), PEERS.make("heterofl")
    after = merged(peer, model, [peer.train(task_of(deepcopy(model), vectors(2)))])
    assert np.array_equal(after["0.weight"][4:], weights(model)["0.weight"][4:])
    assert not np.array_equal(after["0.weight"][:4], weights(model)["0.weight"][:4])


def test_the_widest_window_whose_round_fits() -> None:
    model, data = two_layers(), vectors(4)
    full = known_costs(model, data[0]).full_step_seconds
    rates = [
        affordable_rate(task_of(model, data, allowed_seconds=4 * share * full))[0]
        for share in (math.inf, 1.0, 0.95, 0.6, 0.01)
    ]
    assert rates[:2] == [1.0, 1.0] and rates[-1] == RATES[-1]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) > 2
    with pytest.raises(BudgetError, match="do not pay for one step"):
        PEERS.make("heterofl").train(task_of(model, data, allowed_seconds=0.01 * full))


def test_a_model_without_inner_widths_is_trained_whole() -> None:
    model, data = nn.Sequential(nn.Linear(6, 3)), vectors(4)
    full = known_costs(model, data[0]).full_step_seconds
    result = PEERS.make("heterofl").train(task_of(model, data, allowed_seconds=2.5 * full))
    assert result.steps == 2 and not result.update.parts
