"""The elastic score against a naive reference that takes the real step on a copy of everything."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small_models import TiedLinears, used_twice
from torch import Tensor, nn

from fl_elastic.groups import tensor_groups
from fl_elastic.planning.importance import Probe
from fl_elastic.planning.importance.elastic import ElasticImportance
from fl_elastic.testing.probes import MadeUpTraining, Snapshot, made_up_training

loss_fn = nn.functional.cross_entropy


def naive_score(training: MadeUpTraining, probe: Probe) -> NDArray[np.float64]:
    """Copy model and optimiser, really step on the first batch, take the gradient on the last."""
    model = deepcopy(training.model)
    optimizer = training.optimizer_fn([p for p in model.parameters() if p.requires_grad])
    optimizer.load_state_dict(deepcopy(training.optimizer.state_dict()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    randomness = torch.get_rng_state()
    optimizer.zero_grad()
    torch.autograd.backward(loss_fn(model(probe.batches[0][0]), probe.batches[0][1]))
    optimizer.step()
    torch.set_rng_state(randomness)
    optimizer.zero_grad()
    torch.autograd.backward(loss_fn(model(probe.batches[-1][0]), probe.batches[-1][1]))
    torch.set_rng_state(randomness)
    scores = []
    for group in probe.groups:
        score = 0.0
        for name in group.parameters:
            parameter = model.get_parameter(name)
            assert parameter.grad is not None
            score -= float((parameter.grad * (parameter.detach() - before[name])).sum())
        scores.append(score)
    return np.array(scores)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("optimizer", ["plain", "sgd", "adam"])
def test_score_is_that_of_a_real_step(optimizer: str, seed: int) -> None:
    training = made_up_training(optimizer, seed=seed)
    probe = training.probe(2)
    torch.manual_seed(seed)
    expected = naive_score(training, probe)
    found = ElasticImportance().score(probe)
    assert np.abs(expected).min() > 0
    assert found == pytest.approx(expected, rel=2e-4, abs=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_optimisers_state_counts(optimizer: str) -> None:
    training = made_up_training(optimizer)
    with_state = ElasticImportance().score(training.probe(2))
    fresh = MadeUpTraining(
        training.model,
        training.optimizer_fn([p for p in training.model.parameters() if p.requires_grad]),
        training.optimizer_fn,
        training.batches,
    )
    torch.manual_seed(0)
    without = ElasticImportance().score(fresh.probe(2))
    torch.manual_seed(0)
    assert without == pytest.approx(naive_score(fresh, fresh.probe(2)), rel=2e-4, abs=1e-7)
    assert not np.allclose(with_state, without, rtol=0.05)


def test_scores_sum_to_the_loss_decrease_of_a_small_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    batches = [(torch.randn(32, 6).double(), torch.randint(3, (32,))) for _ in range(2)]

    def small(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4)

    groups = tensor_groups(model, loss_fn, batches[0])
    probe = Probe(model, loss_fn, groups, batches, small, np.random.default_rng(0))
    total = ElasticImportance().score(probe).sum()

    def loss() -> float:
        return loss_fn(model(batches[1][0]), batches[1][1]).item()

    before = loss()
    torch.autograd.backward(loss_fn(model(batches[0][0]), batches[0][1]))
    small(list(model.parameters())).step()
    assert total == pytest.approx(before - loss(), rel=1e-3)


def test_two_batches_remove_the_noise_that_one_adds() -> None:
    # Labels are drawn by chance: nothing can be learnt, so importance is noise alone.
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4))
    for parameter in model[2].parameters():
        nn.init.zeros_(parameter)

    def batch() -> tuple[Tensor, Tensor]:
        inputs = torch.randn(8, 6, generator=generator)
        return inputs, torch.randint(4, (8,), generator=generator)

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    groups = tensor_groups(model, loss_fn, batch())
    one: list[float] = []
    two: list[float] = []
    for _ in range(60):
        first, second = batch(), batch()
        for batches, scores in (([first], one), ([first, second], two)):
            probe = Probe(model, loss_fn, groups, batches, sgd, np.random.default_rng(0))
            scores.append(ElasticImportance().score(probe)[0])
    assert np.mean(one) > 0
    assert abs(np.mean(two)) < 0.25 * np.mean(one)


def test_the_first_batch_gives_the_step_and_the_last_the_gradient() -> None:
    training = made_up_training("plain")
    probe = training.probe(2)
    torch.manual_seed(0)
    forward = ElasticImportance().score(probe)
    training.batches[:2] = training.batches[1::-1]
    torch.manual_seed(0)
    turned = ElasticImportance().score(training.probe(2))
    assert not np.allclose(forward, turned)
    torch.manual_seed(0)
    assert turned == pytest.approx(naive_score(training, training.probe(2)), rel=2e-4, abs=1e-7)


@pytest.mark.parametrize("make", [TiedLinears, used_twice])
def test_tied_weights_move_together_and_are_put_back(make: Callable[[], nn.Module]) -> None:
    model = make()
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(2)]

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    groups = tensor_groups(model, loss_fn, batches[0])
    probe = Probe(model, loss_fn, groups, batches, sgd, np.random.default_rng(0))
    training = MadeUpTraining(
        model, sgd(list(model.parameters())), lambda parameters: sgd(list(parameters)), batches
    )
    before, parameters = Snapshot(model), list(model.parameters())
    scores = ElasticImportance().score(probe)
    assert before.differences() == []
    assert all(old is now for old, now in zip(parameters, model.parameters(), strict=True))
    assert scores == pytest.approx(naive_score(training, probe), rel=1e-4, abs=1e-7)


def test_trainable_parameters_outside_the_groups_keep_their_place_in_the_state() -> None:
    # The optimiser also holds a parameter that takes no part: its state must not slip to another.
    torch.manual_seed(0)

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 4)
            self.used = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    model = Partly()
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(2)]
    template = made_up_training("adam")
    optimizer = template.optimizer_fn(model.parameters())
    for _ in range(2):
        model.unused.weight.grad = torch.randn(4, 4)
        model.unused.bias.grad = torch.randn(4)
        torch.autograd.backward(loss_fn(model(batches[0][0]), batches[0][1]))
        optimizer.step()
        optimizer.zero_grad()
    training = MadeUpTraining(model, optimizer, template.optimizer_fn, list(batches))
    probe = training.probe(2)
    probe = replace(probe, groups=[group for group in probe.groups if group.name == "used"])
    assert ElasticImportance().score(probe) == pytest.approx(naive_score(training, probe), rel=1e-4)
