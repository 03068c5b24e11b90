"""Evaluate a model on a loader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn, batch_shape, to_device
from fl_elastic.groups.forward import outputs_and_loss
from fl_elastic.profiling.measure import model_device

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, share of right classes (0 where outputs are no class scores), and examples seen."""

    loss: float
    accuracy: float
    num_examples: int


def evaluate(model: nn.Module, loss_fn: LossFn, loader: Iterable[Batch]) -> Evaluation:
    """Return loss and accuracy of ``model`` in eval mode; every module's mode is put back.

    Raises
    ------
    TrainingError
        If the loader is empty, or a batch does not fit the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    loss = right = 0.0
    examples = 0
    try:
        with torch.no_grad():
            for batch in loader:
                batch = to_device(batch, model_device(model))
                outputs, batch_loss = outputs_and_loss(model, loss_fn, batch)
                size = (batch_shape(batch) or (1,))[0]
                loss += float(batch_loss) * size
                right += _right_classes(outputs, batch[1])
                examples += size
    finally:
        for module, mode in modes:
            module.training = mode
    if examples == 0:
        raise TrainingError("the test loader gave no batch: check the client's data")
    return Evaluation(loss / examples, right / examples, examples)


def _right_classes(outputs: object, targets: object) -> float:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return 0.0
    if outputs.ndim != 2 or targets.ndim != 1:
        return 0.0
    return float((outputs.argmax(dim=1) == targets).sum())
