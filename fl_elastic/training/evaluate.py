"""Evaluate a model on a loader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn, batch_shape, call_model, to_device
from fl_elastic.profiling.measure import model_device

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, share of right classes (0 where outputs are no class scores), and examples seen."""

    loss: float
    accuracy: float
    num_examples: int


def evaluate(model: nn.Module, loss_fn: LossFn, loader: Iterable[Batch]) -> Evaluation:
    """Return loss and accuracy of ``model`` in eval mode; the training mode is put back.

    Raises
    ------
    TrainingError
        If the loader is empty.
    """
    was_training = model.training
    model.eval()
    loss = right = 0.0
    examples = 0
    try:
        with torch.no_grad():
            for batch in loader:
                inputs, targets = to_device(batch, model_device(model))
                outputs = call_model(model, inputs)
                size = (batch_shape((inputs, targets)) or (1,))[0]
                loss += float(loss_fn(outputs, targets)) * size
                right += _right_classes(outputs, targets)
                examples += size
    finally:
        model.train(was_training)
    if examples == 0:
        raise TrainingError("the test loader gave no batch: check the client's data")
    return Evaluation(loss / examples, right / examples, examples)


def _right_classes(outputs: object, targets: object) -> float:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return 0.0
    if outputs.ndim != 2 or targets.ndim != 1:
        return 0.0
    return float((outputs.argmax(dim=1) == targets).sum())
