"""Sparse tensors, such as rows of words or the neighbours in a graph: as inputs, and as buffers of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import assert_weights, plain_steps
from small_models import loss_fn, sgd, vectors
from torch import Tensor, nn

from fl_elastic import Budget, forget
from fl_elastic.errors import TrainingError, UpdateError
from fl_elastic.flower import ElasticClient
from fl_elastic.training import ElasticTrainer, ForwardOptions, TrainerOptions, evaluate
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.read_out import read_out
from fl_elastic.update import Manifest

LAYOUTS = ["coo", "csr", "csc"]


def as_sparse(dense: Tensor, layout: str) -> Tensor:
    kinds: dict[str, Any] = {
        "coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc
    }  # fmt: skip
    found: Tensor = kinds[layout](dense)
    return found


def dense_data() -> list[tuple[Tensor, Tensor]]:
    return [(x * (x > 0), y) for x, y in vectors(5)]


def data(layout: str) -> list[tuple[Tensor, Tensor]]:
    return [(as_sparse(x, layout), y) for x, y in dense_data()]


class Words(nn.Module):
    """Reads rows of which most numbers are zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(0.3 * torch.randn(6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(torch.sparse.mm(x, self.weight)))
        return found


class Graph(nn.Module):
    """Adds up neighbours, which are the same for all batches."""

    def __init__(self, layout: str, persistent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        near = torch.eye(8) + torch.diag(torch.ones(7), 1)
        self.register_buffer("near", as_sparse(near, layout), persistent=persistent)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.near, Tensor)
        found: Tensor = self.head(torch.relu(torch.sparse.mm(self.near, self.first(x))))
        return found


def by_hand(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    optimizer = sgd(model.parameters())
    plain_steps(model, optimizer, batches, loss_fn)
    return model


@pytest.mark.parametrize("policy", ["full", "elastic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_train_as_in_a_plain_loop(layout: str, policy: str) -> None:
    for make, batches in ((Words, data(layout)), (partial(Graph, layout), dense_data())):
        model, expected = make(), by_hand(make(), batches)
        ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy=policy).fit(batches)
        assert_weights(model, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_client_needs_no_name_for_its_data_and_a_budget_of_memory_is_held(layout: str) -> None:
    batches, budget = data(layout), Budget(memory=1e6)
    client = ElasticClient(
        Words(), batches, batches, budget=budget, policy="full", loss_fn=loss_fn, optimizer_fn=sgd
    )
    arrays, examples, _ = client.fit(client.get_parameters({}), {})
    assert len(arrays) == 3 and examples == 40
    loss, examples, _ = client.evaluate(arrays, {})
    assert examples == 40 and loss == pytest.approx(
        evaluate(by_hand(Words(), batches), loss_fn, batches).loss
    )


def test_a_sparse_buffer_of_the_state_is_refused_with_what_to_do() -> None:
    with pytest.raises(UpdateError, match=r"'near' is sparse.*persistent=False"):
        Manifest.of(Graph("coo", persistent=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_takes_examples_apart_works_on_what_is_dense_or_says_so(layout: str) -> None:
    batches, options = data(layout), TrainerOptions(forward=ForwardOptions(1 << 20))
    assert head_sums(Words(), batches).num_examples == 40
    assert read_out(Words(), batches).model is not None
    trainer = ElasticTrainer(Words(), loss_fn, sgd, budget=Budget(), policy="head", options=options)
    forward = trainer.fit(batches, epochs=2).forward
    assert forward is not None and "sparse" in forward.refused
    with pytest.raises(TrainingError, match="cannot be taken apart"):
        forget(Words(), loss_fn, batches[:1], batches)
