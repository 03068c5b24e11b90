"""Rounds of clients against a loop and FedAvg by hand, over random models, data, optimisers and strategies.

The reference knows torch alone: it loads the global state, takes plain steps on what has examples, and averages the
clients' tensors weighted by how many examples they really have.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from odd_models import (
    LOADERS,
    Kind,
    batch_of,
    drawn_kind,
    is_empty,
    loader_of,
    loss_of,
    net_of,
    scores_of,
    targets_of,
)
from odd_optimizers import OPTIMIZERS, sgd
from small_federation import as_weights, run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_elastic import Budget
from fl_elastic.flower import ElasticClient, PartialUpdates, elastic_client_app

SEEDS = 200
FEW = 12
_OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    **OPTIMIZERS,
}


@dataclass(frozen=True)
class Drawn:
    """What a seed stands for."""

    kind: Kind
    optimizer: str
    policy: str
    strategy: str
    loader: str
    epochs: int
    thawed: bool
    data: tuple[tuple[Any, ...], ...] = field(repr=False)

    @property
    def weights_stay(self) -> set[str]:
        """Parts of the model that are frozen by their owner in the first round."""
        return {"encoder"} if self.thawed else set()


def drawn(seed: int) -> Drawn:
    rng = random.Random(seed)
    kind = drawn_kind(rng)
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(rng.randint(2, 3)):
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.4:
            sizes.insert(rng.randint(0, len(sizes)), 0)
        data.append(tuple(batch_of(kind, size, generator) for size in sizes))
    return Drawn(
        kind,
        optimizer=rng.choice(list(_OPTIMIZERS)),
        policy=rng.choice(["full", "full", "head"]),
        strategy=rng.choice(["partial", "partial", "stock"]),
        loader=rng.choice(list(LOADERS)),
        epochs=rng.randint(1, 2),
        thawed=rng.random() < 0.25,
        data=tuple(data),
    )


def frozen(model: nn.Module, parts: set[str]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            not name.startswith("target") and name.partition(".")[0] not in parts
        )
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {n: each.clone() for n, each in model.state_dict().items() if isinstance(each, Tensor)}


class ByHand:
    """A federation of plain loops."""

    def __init__(self, case: Drawn, seed: int) -> None:
        self.case = case
        self.clients = [frozen(net_of(case.kind, seed), case.weights_stay) for _ in case.data]
        self.state = tensors(self.clients[0])

    def round(self) -> None:
        sums: dict[str, Any] = {}
        total = 0
        for model, batches in zip(self.clients, self.case.data, strict=True):
            self._train(model, [each for each in batches if not is_empty(each)])
            count = sum(len(targets_of(batch)) for batch in batches)
            for name, value in tensors(model).items():
                sums[name] = sums.get(name, 0) + count * value.double()
            total += count
        self.state = {name: (each / total).float() for name, each in sums.items()}

    def _train(self, model: nn.Module, batches: list[Any]) -> None:
        model.load_state_dict({**model.state_dict(), **self.state})
        model.train()
        head = {id(each) for name, each in model.named_parameters() if name.startswith("head.")}
        owned = [each for each in model.parameters() if each.requires_grad]
        trained = [each for each in owned if self.case.policy == "full" or id(each) in head]
        optimizer = _OPTIMIZERS[self.case.optimizer](owned)
        still = [each for each in owned if not any(each is one for one in trained)]
        for batch in batches * self.case.epochs:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            for each in still:
                each.grad = None
            before = [each.detach().clone() for each in still]
            optimizer.step()
            with torch.no_grad():
                for each, value in zip(still, before, strict=True):
                    each.copy_(value)


def federated(case: Drawn, seed: int, rounds: int) -> tuple[dict[str, Any], list[ElasticClient]]:
    start = frozen(net_of(case.kind, seed), case.weights_stay)
    clients = [
        ElasticClient(
            frozen(net_of(case.kind, seed), case.weights_stay),
            loader_of(case.loader, list(batches)), list(batches), budget=Budget(),
            policy=case.policy, loss_fn=cross_entropy, optimizer_fn=_OPTIMIZERS[case.optimizer],
            epochs=case.epochs, client_id=str(number),
        )
        for number, batches in enumerate(case.data)
    ]  # fmt: skip

    def app_of(client: ElasticClient) -> ClientApp:
        def made(_: Any) -> ElasticClient:
            if client.report is not None:
                frozen(client.model, set())
            return client

        return elastic_client_app(made)

    apps = {number: app_of(client) for number, client in enumerate(clients, start=1)}
    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=len(apps))
    strategy = PartialUpdates(inner) if case.strategy == "partial" else inner
    result, _ = run(strategy, apps, ArrayRecord(tensors(start)), rounds)
    return as_weights(result.arrays), clients


def check_against_plain(seed: int) -> None:
    case = drawn(seed)
    reference = ByHand(case, seed)
    for number in range(2):
        if number:
            for model in reference.clients:
                frozen(model, set())
        reference.round()
    found, clients = federated(case, seed, 2)
    for name, expected in reference.state.items():
        torch.testing.assert_close(
            torch.from_numpy(np.array(found[name])), expected, rtol=2e-4, atol=2e-5,
            msg=lambda text, name=name: f"{case}\n{name}: {text}",
        )  # fmt: skip
    for client, model, batches in zip(clients, reference.clients, case.data, strict=True):
        assert client.report is not None
        count = sum(len(targets_of(batch)) for batch in batches)
        assert client.report.num_examples == count
        model.load_state_dict({**model.state_dict(), **reference.state})
        assert_evaluates(client, copy.deepcopy(model), list(batches), list(found.values()))


def assert_evaluates(
    client: ElasticClient, model: nn.Module, batches: list[Any], arrays: list[Any]
) -> None:
    """Loss and accuracy are means over the examples, whatever the batches are made of."""
    model.eval()
    filled = [batch for batch in batches if not is_empty(batch)]
    with torch.no_grad():
        scores = torch.cat([scores_of(model, batch) for batch in filled])
    targets = torch.cat([targets_of(batch) for batch in filled])
    loss, examples, metrics = client.evaluate(arrays, {})
    assert examples == len(targets)
    assert loss == pytest.approx(float(cross_entropy(scores, targets)), rel=1e-3)
    right = float((scores.argmax(1) == targets).float().mean())
    assert metrics["accuracy"] == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("seed", range(FEW))
def test_a_random_federation_ends_where_the_plain_one_does(seed: int) -> None:
    check_against_plain(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, SEEDS))
def test_many_random_federations_end_where_the_plain_ones_do(seed: int) -> None:
    check_against_plain(seed)
