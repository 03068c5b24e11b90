"""HeteroFL: a round of a wide and a narrow client by hand, labels, rates and costs."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from peer_tasks import RATE, assert_close, by_hand, known_costs, merged, task_of, weights
from small_models import conv_net, images, sgd, vectors
from torch import Tensor, nn

from fl_elastic.errors import BudgetError, ModelError
from fl_elastic_simulations.peers import PEERS, heterofl
from fl_elastic_simulations.peers.heterofl import RATES, affordable_rate, labels_present
from fl_elastic_simulations.peers.widths import channels_of


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def narrow_by_hand(model: nn.Sequential, batches: list[Any], rate: float) -> dict[str, Tensor]:
    """The narrow client's round with explicit slices and the scaler, without an optimiser."""
    kept = math.ceil(8 * rate)
    w1, b1 = model[0].weight[:kept].detach().clone(), model[0].bias[:kept].detach().clone()
    w2, b2 = model[2].weight[:, :kept].detach().clone(), model[2].bias.detach().clone()
    tensors = [w1, b1, w2, b2]
    for inputs, targets in batches:
        for tensor in tensors:
            tensor.requires_grad_(True)
        hidden = torch.relu((inputs @ w1.T + b1) / rate)
        loss = nn.functional.cross_entropy(hidden @ w2.T + b2, targets)
        gradients = torch.autograd.grad(loss, tensors)
        with torch.no_grad():
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor -= RATE * gradient
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    return {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}


@pytest.fixture
def known_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step at rate r costs r of a full one."""

    def seconds(task: Any, layers: Any, rate: float, first: Any) -> float:
        return rate * task.profile.full_step_seconds

    monkeypatch.setattr(heterofl, "_narrow_step_seconds", seconds)


@pytest.mark.usefixtures("known_widths")
@pytest.mark.parametrize("rate", [1 / 2, 1 / 4])
def test_each_element_is_the_mean_of_those_who_hold_it(rate: float) -> None:
    model, wide, small = two_layers(), vectors(3, seed=1), vectors(3, size=4, seed=2)
    profile, peer = known_costs(model, wide[0]), PEERS.make("heterofl")
    full = 3 * profile.full_step_seconds
    results = [
        peer.train(task_of(deepcopy(model), data, profile=profile, allowed_seconds=allowed))
        for data, allowed in ((wide, full), (small, rate * full))
    ]
    assert [r.host_seconds for r in results] == pytest.approx([full, rate * full])
    one = by_hand(model, wide, ["0.weight", "0.bias", "2.weight", "2.bias"], 3)
    two = narrow_by_hand(model, small, rate)
    expected = {name: tensor.clone() for name, tensor in one.items()}
    for name, tensor in two.items():
        front = tuple(slice(length) for length in tensor.shape)
        # Twice as many examples count no more than half as many.
        expected[name][front] = (one[name][front] + tensor) / 2
    assert_close(merged(peer, model, results), expected)
    assert results[0].update.parts == {}
    assert sorted(results[1].update.parts) == ["0.bias", "0.weight", "2.weight"]
    rows, columns = results[1].update.parts["2.weight"]
    assert rows is None and columns is not None and columns.sum() == math.ceil(8 * rate)


@pytest.mark.usefixtures("known_widths")
def test_what_no_one_holds_keeps_its_value() -> None:
    model, data = two_layers(), vectors(2)
    peer = PEERS.make("heterofl")
    result = peer.train(task_of(deepcopy(model), data, allowed_seconds=5.0))
    after, before = merged(peer, model, [result]), weights(model)
    rate = next(r for r in RATES if r * known_costs(model, data[0]).full_step_seconds * 2 <= 5.0)
    kept = math.ceil(8 * rate)
    assert 0 < kept < 8
    assert np.array_equal(after["0.weight"][kept:], before["0.weight"][kept:])
    assert np.array_equal(after["2.weight"][:, kept:], before["2.weight"][:, kept:])
    assert (after["0.weight"][:kept] != before["0.weight"][:kept]).any()
    assert (after["2.weight"][:, :kept] != before["2.weight"][:, :kept]).all()


@pytest.mark.usefixtures("known_widths")
@pytest.mark.parametrize(
    ("share", "rate", "steps"),
    [(math.inf, 1, 4), (1, 1, 4), (0.99, 1 / 2, 4), (0.3, 1 / 4, 4), (1 / 16, 1 / 16, 4),
     (0.4 / 16, 1 / 16, 1), (0.6 / 16, 1 / 16, 2)],
)  # fmt: skip
def test_the_widest_model_whose_round_fits(share: float, rate: float, steps: int) -> None:
    model, data = conv_net(), images(4)
    full = known_costs(model, data[0]).full_step_seconds
    task = task_of(model, data, allowed_seconds=4 * share * full)
    assert affordable_rate(task, channels_of(model, data[0][0]), data[0])[0] == rate
    result = PEERS.make("heterofl").train(task)
    assert result.steps == steps
    assert result.host_seconds == pytest.approx(steps * rate * full)


@pytest.mark.usefixtures("known_widths")
@pytest.mark.parametrize("width", [1.0, 1 / 2, 1 / 8])
def test_a_width_that_is_given_is_kept_with_fewer_steps_where_time_is_short(width: float) -> None:
    model, data = conv_net(), images(4)
    full, layers = known_costs(model, data[0]).full_step_seconds, channels_of(model, data[0][0])
    for steps in (4, 2):
        allowed = (steps + 0.5) * width * full if steps < 4 else math.inf
        task = task_of(model, data, allowed_seconds=allowed, width=width)
        assert affordable_rate(task, layers, data[0])[0] == width
        result = PEERS.make("heterofl").train(task)
        assert result.steps == steps
        assert result.host_seconds == pytest.approx(steps * width * full)


@pytest.mark.usefixtures("known_widths")
def test_a_client_without_time_for_the_narrowest_step_stays_out() -> None:
    model, data = conv_net(), images(4)
    full = known_costs(model, data[0]).full_step_seconds
    before = weights(model)
    with pytest.raises(BudgetError, match="do not pay for one step"):
        PEERS.make("heterofl").train(task_of(model, data, allowed_seconds=0.99 * full / 16))
    assert all(np.array_equal(value, weights(model)[name]) for name, value in before.items())


def test_widths_that_the_task_knows_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heterofl, "profile_model", None)
    monkeypatch.setattr(heterofl, "_SECONDS", {})
    model, data = conv_net(), images(4)
    full = known_costs(model, data[0]).full_step_seconds
    known = {rate: rate * full / 2 for rate in RATES[1:]}
    task = task_of(model, data, allowed_seconds=4 * 0.3 * full, narrow_seconds=known)
    result = PEERS.make("heterofl").train(task)
    assert result.steps == 4 and result.host_seconds == pytest.approx(4 * 0.25 * full)


def test_the_cost_of_a_width_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, ...]] = []
    real = heterofl.profile_model

    def counting(model: nn.Module, loss: Any, batch: Any, **options: Any) -> Any:
        measured.append(tuple(batch[0].shape))
        return real(model, loss, batch, **options)

    monkeypatch.setattr(heterofl, "profile_model", counting)
    monkeypatch.setattr(heterofl, "_SECONDS", {})
    model, data = conv_net(), images(2)
    profile = known_costs(model, data[0])
    for seed, size in ((0, 6), (1, 2), (2, 6)):
        few = images(2, size=size, seed=seed)
        task = task_of(deepcopy(model), few, profile=profile, allowed_seconds=20.0)
        result = PEERS.make("heterofl").train(task)
        assert 0 < result.host_seconds < 20.0
    # Also for the client whose batches are smaller: of the profile's size.
    assert measured == [(6, 3, 8, 8)]


@pytest.mark.usefixtures("known_widths")
def test_small_clients_send_no_statistics_and_wide_ones_do() -> None:
    model, data = conv_net(), images(3)
    statistics = {name for name, _ in model.named_buffers() if "tracked" not in name}
    sent = []
    for allowed in (math.inf, 20.0):
        task = task_of(deepcopy(model), data, allowed_seconds=allowed)
        result = PEERS.make("heterofl").train(task)
        sent.append(set(result.update.deltas) & statistics)
        if allowed == 20.0:
            assert all(
                torch.equal(task.model.get_buffer(n), model.get_buffer(n)) for n in statistics
            )
    assert sent == [statistics, set()]


@pytest.mark.usefixtures("known_widths")
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_classes_that_a_client_lacks_are_left_alone(share: float) -> None:
    model = two_layers()
    data = [(inputs, targets % 2) for inputs, targets in vectors(3)]
    full = known_costs(model, data[0]).full_step_seconds
    task = task_of(deepcopy(model), data, optimizer_fn=sgd, allowed_seconds=3 * share * full)
    update = PEERS.make("heterofl").train(task).update
    assert not update.deltas["2.weight"][2].any() and update.deltas["2.weight"][:2].any()
    assert update.parts["2.bias"][0].tolist() == [True, True, False]
    assert np.array_equal(task.model[2].weight[2].detach(), model[2].weight[2].detach())


@pytest.mark.usefixtures("known_widths")
def test_scores_of_absent_classes_count_as_zero() -> None:
    model = two_layers()
    data = [(inputs, targets % 2) for inputs, targets in vectors(1)]
    task = task_of(deepcopy(model), data)
    result = PEERS.make("heterofl").train(task)
    scores = model(data[0][0]).detach()
    scores[:, 2] = 0.0
    assert result.loss == pytest.approx(nn.functional.cross_entropy(scores, data[0][1]).item())


def test_only_class_indices_are_masked() -> None:
    layers = channels_of(two_layers(), torch.zeros(1, 6))
    inputs = torch.zeros(2, 6)
    assert labels_present([(inputs, torch.tensor([0, 2]))], layers).tolist() == [True, False, True]
    assert labels_present([(inputs, torch.zeros(2))], layers) is None
    assert labels_present([(inputs, torch.zeros(2, 3, dtype=torch.long))], layers) is None
    assert labels_present([(inputs, torch.tensor([0, -100]))], layers) is None
    assert labels_present([(inputs, torch.tensor([0, 3]))], layers) is None


def test_inputs_that_are_not_one_tensor_are_refused() -> None:
    data = vectors(1)
    model = two_layers()
    several = [({"input": data[0][0]}, data[0][1])]
    task = task_of(model, several, profile=known_costs(model, data[0]))
    with pytest.raises(ModelError, match="one tensor as input, not dict"):
        PEERS.make("heterofl").train(task)
