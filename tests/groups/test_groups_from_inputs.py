"""Models that cannot work on differentiable inputs are traced all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import loss_fn, sgd, vectors
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.groups.from_inputs import loss_from_inputs
from fl_elastic.groups.trace import trace_step
from fl_elastic.training import ElasticTrainer


class Plain(nn.Module):
    """Three layers, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def prepared(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(self.prepared(x)))))
        out: Tensor = self.head(y) * self.scale
        return out


class SetsFlag(Plain):
    """As speech models of transformers do, to recompute their first layers."""

    def prepared(self, x: Tensor) -> Tensor:
        x = x[:, :]
        x.requires_grad = True
        return x


class AsksNumpy(Plain):
    """Prepares its inputs outside of torch."""

    def prepared(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().copy())


@pytest.mark.parametrize("kind", [SetsFlag, AsksNumpy])
def test_the_graph_is_that_of_the_model_that_takes_any_input(kind: type[Plain]) -> None:
    found, plain = (trace_step(model, loss_fn, vectors()[0]).graph for model in (kind(), Plain()))
    assert found.groups == plain.groups
    assert found.cuts == plain.cuts and found.blocks == plain.blocks
    assert plain.cuts
    # A model is given a copy of its inputs where it is called for the first time.
    layers = [node for node in plain.nodes if node.name != "CloneBackward0"]
    assert [(node.name, node.group) for node in found.nodes] == [
        (node.name, node.group) for node in layers
    ]


@pytest.mark.parametrize("kind", [SetsFlag, AsksNumpy])
def test_such_a_model_trains(kind: type[Plain]) -> None:
    torch.manual_seed(1)
    model, twin = kind(), Plain()
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        budget = Budget(memory=1e9)
        ElasticTrainer(each, loss_fn, sgd, budget=budget, policy="full").fit(vectors(3))
    for name, weight in twin.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_a_frozen_embedding_that_runs_without_gradients_stands_for_no_input() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 6).requires_grad_(False)
            self.head = nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Any:
            with torch.no_grad():
                x = self.embedding(tokens).mean(1)
            return self.head(x)

    batch = torch.randint(9, (4, 5)), torch.randint(3, (4,))
    _, sources = loss_from_inputs(Reads(), loss_fn, batch)
    assert sources == set()


@pytest.mark.parametrize("kind", [Plain, SetsFlag])
def test_what_does_not_fit_is_refused_as_ever(kind: type[Plain]) -> None:
    with pytest.raises(TrainingError, match=r"inputs of shape \(4, 5\)"):
        trace_step(kind(), loss_fn, (torch.randn(4, 5), torch.randint(3, (4,))))
