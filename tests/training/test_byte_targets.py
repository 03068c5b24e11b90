"""Targets stored as bytes mean the same classes as long ones, also class 156, which is -100 as a byte."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.training import evaluate
from fl_elastic.training.head_pass import head_sums

CLASSES = torch.tensor([156, 3, 156, 199, 156, 0])
WEIGHTED = nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 200))


def batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    return list(zip(inputs.split(3), CLASSES.repeat(2).to(dtype).split(3), strict=True))


@pytest.mark.parametrize("loss_fn", [cross_entropy, WEIGHTED])
def test_bytes_are_classes_like_any_other(loss_fn: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 200)
    found = {}
    for dtype in (torch.uint8, torch.int64):
        mine = deepcopy(model)
        trainer = ElasticTrainer(
            mine, loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), budget=Budget(), policy="full"
        )
        trainer.fit(batches(dtype))
        tested = evaluate(mine, loss_fn, batches(dtype))
        sums = head_sums(model, batches(dtype))
        found[dtype] = (
            trainer.update().num_examples, tested.loss, tested.accuracy, tested.num_examples,
            mine.weight.sum().item(), sums.num_examples, sums.targets[-1, 156].item(),
        )  # fmt: skip
    assert found[torch.uint8] == pytest.approx(found[torch.int64])
    assert found[torch.uint8][0] == found[torch.uint8][3] == 12
