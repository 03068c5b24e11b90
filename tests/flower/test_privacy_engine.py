"""Opacus on the client: its steps are taken as by a plain loop, and nothing tells of the data beside them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from plain_loop import assert_weights
from small_federation import legacy_app, quiet, run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_elastic import Budget, ElasticTrainer, TrainerOptions
from fl_elastic.errors import TrainingError
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundConfig
from fl_elastic.planning import policies
from fl_elastic.training import Timing

opacus = pytest.importorskip("opacus")

BUDGETS = {
    "none": Budget(),
    "memory": Budget(memory=60_000),
    "deadline": Budget(deadline=60.0),
    "speedup": Budget(speedup=1.5),
}
Private = tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def rows(seed: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(32, 2, 6, generator=generator), torch.randint(3, (32,), generator=generator)
    return TensorDataset(x, y)


def private(noise: float = 1.0, poisson: bool = True, seed: int = 2) -> Private:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = opacus.PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(rows(seed), batch_size=8),
        noise_multiplier=noise, max_grad_norm=0.5, poisson_sampling=poisson,
    )  # fmt: skip
    return (*made, engine)


def by_hand(trained: set[str], steps: int) -> dict[str, Tensor]:
    """What Opacus itself makes of some layers, without noise."""
    model, optimizer, loader, _ = private(noise=0.0, poisson=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    for step, (x, y) in enumerate(loader):
        if step < steps:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("policy", ["full", "head", "last_k", "bias", "random"])
def test_steps_are_those_of_the_engine(policy: str, budget: str) -> None:
    model, optimizer, loader, engine = private(noise=0.0, poisson=False)
    # By measured times a plan may change in the middle, as the machine's load does.
    trainer = ElasticTrainer(
        model, cross_entropy, lambda _: optimizer, budget=BUDGETS[budget], policy=policy,
        options=TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False)),
    )  # fmt: skip
    report = trainer.fit(loader)
    assert len({plan.trained_parameters for _, plan in report.plans}) == 1
    expected = by_hand(set(report.plan.trained_parameters), report.steps)
    assert_weights(model, expected, rtol=1e-4, atol=1e-6)
    assert set(trainer.update().deltas) == {
        name.removeprefix("_module.") for name in report.plan.trained_parameters
    }
    # Estimates and full passes cost no privacy: the accountant counts the steps that were taken.
    assert sum(count for *_, count in engine.accountant.history) == report.steps


def test_noise_is_added_to_what_is_trained_alone() -> None:
    model, optimizer, loader, _ = private(noise=5.0)
    before = copy.deepcopy(model.state_dict())
    trainer = ElasticTrainer(
        model, cross_entropy, lambda _: optimizer, budget=Budget(), policy="head"
    )
    report = trainer.fit(loader, epochs=2)
    moved = {n for n, each in model.state_dict().items() if not torch.equal(each, before[n])}
    assert moved == set(report.plan.trained_parameters)
    assert 0 < report.num_examples <= 32


@pytest.mark.parametrize("policy", policies())
def test_a_policy_that_looks_at_the_data_is_refused(policy: str) -> None:
    model, optimizer, loader, engine = private()
    trainer = ElasticTrainer(
        model, cross_entropy, lambda _: optimizer, budget=Budget(), policy=policy
    )
    told = {"full", "head", "last_k", "bias", "random"}
    if policy in told:
        assert trainer.fit(loader).steps
        return
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((TrainingError, ValueError)) as caught:
        trainer.fit(loader)
    if trainer.planner.policy.reads_data:
        assert "adds noise" in str(caught.value) and "'last_k'" in str(caught.value)
        assert not engine.accountant.history
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_federation_of_private_clients_has_the_names_of_a_plain_model() -> None:
    """The server knows nothing of the wrapper around its clients' models."""
    engines: dict[int, Any] = {}

    def client_of(node: int) -> ElasticClient:
        model, optimizer, loader, engines[node] = private(seed=node)
        test = DataLoader(rows(9), batch_size=16)
        return ElasticClient(
            model, loader, test, budget=Budget(), policy="last_k", loss_fn=cross_entropy,
            optimizer_fn=lambda _: optimizer, client_id=str(node),
        )  # fmt: skip

    start = net()
    arrays = ArrayRecord(start.state_dict())
    apps = {node: legacy_app(lambda node=node: client_of(node)) for node in (1, 2)}
    result, _ = run(PartialUpdates(quiet(nodes=2)), apps, arrays, 2)
    for name, array in result.arrays.items():
        assert array.numpy().shape == tuple(start.state_dict()[name].shape)
        assert (array.numpy() != start.state_dict()[name].numpy()).any(), name
    assert all(engine.accountant.history for engine in engines.values())


def test_sums_over_the_data_are_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    def client_of() -> ElasticClient:
        model, optimizer, loader, _ = private()
        return ElasticClient(
            model, loader, loader, budget=Budget(), policy="last_k", loss_fn=cross_entropy,
            optimizer_fn=lambda _: optimizer, client_id="1",
        )  # fmt: skip

    terms = RoundConfig(read="last")
    run(
        PartialUpdates(quiet(nodes=2), config=terms),
        {node: legacy_app(client_of) for node in (1, 2)},
        ArrayRecord(net().state_dict()), 1,
    )  # fmt: skip
    assert "computed from the data without noise" in caplog.text
