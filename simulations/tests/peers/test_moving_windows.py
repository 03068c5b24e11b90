"""Peers that differ from HeteroFL in where their windows begin."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from peer_tasks import RATE, known_costs, task_of
from small_models import vectors
from torch import nn

from fl_elastic_simulations.peers import PEERS
from fl_elastic_simulations.peers.heterofl import RATES
from fl_elastic_simulations.peers.widths import channels_of


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def result_of(peer: str, model: nn.Module, data: list[Any], **settings: Any) -> Any:
    """A round for which half of the channels fit."""
    full = known_costs(model, data[0]).full_step_seconds
    task = task_of(
        model, data, allowed_seconds=0.5 * len(data) * full,
        narrow_seconds={rate: rate * full for rate in RATES}, **settings,
    )  # fmt: skip
    return PEERS.make(peer).train(task)


def window_of(update: Any) -> list[int]:
    return np.flatnonzero(update.parts["0.weight"][0]).tolist()


def test_windows_of_fedrolex_go_round() -> None:
    model, data = two_layers(), vectors(2)
    windows = [
        window_of(result_of("fedrolex", deepcopy(model), data, server_round=number).update)
        for number in range(1, 10)
    ]
    assert windows[0] == windows[8] == [0, 1, 2, 3]
    assert windows[5] == [0, 5, 6, 7]
    held = np.bincount(np.concatenate(windows[:8]), minlength=8)
    # Over as many rounds as there are channels each is trained in half of them.
    assert held.tolist() == [4] * 8


def test_random_windows_differ_between_rounds_and_clients_and_cover_every_channel() -> None:
    model, data = two_layers(), vectors(1)
    drawn = [
        window_of(
            result_of(
                "random_windows", deepcopy(model), data, server_round=number, client=client
            ).update
        )
        for number in range(1, 9)
        for client in (0, 1)
    ]
    assert len({tuple(window) for window in drawn}) > 3
    assert set(np.concatenate(drawn).tolist()) == set(range(8))


@pytest.mark.parametrize("number", [1, 3, 7])
def test_a_window_is_trained_as_by_hand(number: int) -> None:
    model, data = two_layers(), vectors(1, size=24)
    # A class that is missing would be masked.
    assert len(data[0][1].unique()) == 3
    units = [(number - 1 + place) % 8 for place in range(4)]
    before = deepcopy(model)
    update = result_of("fedrolex", model, data, server_round=number).update
    first, last = before[0].weight[units], before[2].weight[:, units]
    tensors = [
        t.detach().clone().requires_grad_(True) for t in (first, before[0].bias[units], last)
    ]
    hidden = torch.relu((data[0][0] @ tensors[0].T + tensors[1]) / 0.5)
    loss = nn.functional.cross_entropy(hidden @ tensors[2].T + before[2].bias, data[0][1])
    for name, gradient, axis in zip(
        ("0.weight", "0.bias", "2.weight"),
        torch.autograd.grad(loss, tensors),
        (0, 0, 1),
        strict=True,
    ):
        delta = torch.as_tensor(update.deltas[name])
        found = delta.index_select(axis, torch.tensor(units))
        torch.testing.assert_close(found, -RATE * gradient, rtol=1e-4, atol=1e-6)
        assert int(torch.count_nonzero(delta)) == int(torch.count_nonzero(found))


def test_heterofl_always_trains_the_first_channels() -> None:
    model, data = two_layers(), vectors(1)
    for number in (1, 4):
        assert window_of(
            result_of("heterofl", deepcopy(model), data, server_round=number).update
        ) == [0, 1, 2, 3]
    assert len(channels_of(model, data[0][0])) == 2
