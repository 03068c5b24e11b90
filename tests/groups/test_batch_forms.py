"""Batches of every form: pairs, longer tuples, dicts; what they are to the model, the loss and the counts."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from small_models import chain, vectors
from torch import Tensor, nn

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.flower import ElasticClient
from fl_elastic.groups import tensor_groups
from fl_elastic.groups.batch import as_pair
from fl_elastic.losses import own_loss
from fl_elastic.training import evaluate
from fl_elastic.training.loader import loader_size

LOSS = nn.functional.cross_entropy
FORMS: dict[str, Any] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "label": lambda x, y: {"image": x, "label": y},
    "target": lambda x, y: UserDict({"target": y, "x": x}),
    "labels": lambda x, y: {"labels": y, "input": x},
    "labels of an object": lambda x, y: UserDict({"input": x, "labels": y}),
}


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return chain()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(batches: list[Any], model: nn.Module, loss_fn: Any = LOSS) -> dict[str, Tensor]:
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    assert trainer.update().num_examples == sum(len(as_pair(each)[1]) for each in batches)
    return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_any_form_trains_as_the_pair_does(form: str) -> None:
    pairs = vectors(3)
    batches = [FORMS[form](*each) for each in pairs]
    expected, found = trained(pairs, seeded()), trained(batches, seeded())
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert evaluate(seeded(), LOSS, batches) == evaluate(seeded(), LOSS, pairs)
    assert loader_size(batches, batches[0]) == loader_size(pairs, pairs[0])
    assert tensor_groups(seeded(), LOSS, batches[0]) == tensor_groups(seeded(), LOSS, pairs[0])


class Sum(nn.Module):
    """Takes two tensors, and computes a loss itself if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(6, 3)

    def forward(self, one: Tensor, two: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.linear(one + two)
        if labels is None:
            return scores
        return {"loss": LOSS(scores, labels), "logits": scores}


def test_longer_tuples_end_with_the_targets_and_models_give_their_own_loss() -> None:
    pairs = vectors(3)
    threes = [(x / 2, x / 2, y) for x, y in pairs]
    dicts = [{"one": x / 2, "two": x / 2, "labels": y} for x, y in pairs]
    expected = trained([((x / 2, x / 2), y) for x, y in pairs], Sum())
    for found in (trained(threes, Sum()), trained(dicts, Sum(), own_loss)):
        assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_client_needs_no_loss_function_where_the_model_has_one() -> None:
    pairs = vectors(3)
    dicts = [{"one": x / 2, "two": x / 2, "labels": y} for x, y in pairs]
    threes = [(x / 2, x / 2, y) for x, y in pairs]

    def metrics(outputs: Any, labels: Tensor) -> dict[str, float]:
        scores = outputs["logits"] if isinstance(outputs, dict) else outputs
        return {"right": float((scores.argmax(1) == labels).float().mean())}

    found = []
    for batches in (dicts, threes):
        client = ElasticClient(
            Sum(), batches, batches, budget=Budget(), policy="full", optimizer_fn=sgd,
            metrics_fn=metrics,
        )  # fmt: skip
        weights, examples, _ = client.fit(client.get_parameters({}), {})
        loss, _, said = client.evaluate(weights, {})
        assert examples == sum(len(y) for _, y in pairs)
        found.append((loss, said["right"], [each.tolist() for each in weights]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"input_ids": torch.zeros(2, 2)}, r"needs targets under one of .*got \['input_ids'\]"),
        ({"label": torch.zeros(2)}, "beside inputs"),
        ({}, r"got \[\]"),
        ([1, 2, 3], "must be a pair"),
        (torch.zeros(3, 2), "must be a pair .* got Tensor of 3"),
    ],
)
def test_what_has_no_targets_is_explained(batch: Any, reason: str) -> None:
    for use in (
        lambda: tensor_groups(seeded(), LOSS, batch),
        lambda: trained([batch], seeded()),
        lambda: evaluate(seeded(), LOSS, [batch]),
    ):
        with pytest.raises(TrainingError, match=reason):
            use()


def test_outputs_without_a_loss_are_explained() -> None:
    with pytest.raises(ModelError, match="hold no loss"):
        own_loss({"logits": torch.zeros(2)}, None)
    with pytest.raises(ModelError, match="hold no loss"):
        own_loss(torch.zeros(2), None)
