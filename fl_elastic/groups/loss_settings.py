"""Settings of a loss function: the class that it ignores, its reduction, and its class weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss

from fl_elastic.groups.batch import IGNORED, CountExamples, ExampleCounter, is_ignored
from fl_elastic.losses import classification_loss, own_loss, own_loss_or_cross_entropy

if TYPE_CHECKING:
    from fl_elastic.groups.forward import LossFn

_OF_CLASSES = (cross_entropy, nll_loss, classification_loss, own_loss_or_cross_entropy)


def ignored_class(loss_fn: LossFn) -> int:
    """Return the class that a loss ignores; -100, as in PyTorch, if the loss names none.

    >>> ignored_class(nn.CrossEntropyLoss(ignore_index=255)), ignored_class(cross_entropy)
    (255, -100)
    >>> ignored_class(partial(cross_entropy, ignore_index=255))
    255
    """
    return int(_setting(loss_fn, "ignore_index", IGNORED))


def example_counter(loss_fn: LossFn, count_examples: CountExamples | None = None) -> ExampleCounter:
    """Return a counter of the examples of batches, which leaves out the class that the loss ignores."""
    return ExampleCounter(count_examples, ignored_class(loss_fn))


def is_summed(loss_fn: LossFn) -> bool:
    """Return whether a loss is set to return the sum over a batch and not the mean.

    >>> is_summed(partial(cross_entropy, reduction="sum")), is_summed(cross_entropy)
    (True, False)
    """
    return bool(_setting(loss_fn, "reduction", "mean") == "sum")


def weighs_classes(loss_fn: LossFn) -> bool:
    """Return whether a loss has unequal class weights, or weights of positive targets other than 1.

    >>> weighs_classes(nn.CrossEntropyLoss(torch.tensor([1.0, 9.0]))), weighs_classes(cross_entropy)
    (True, False)
    >>> weighs_classes(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([9.0])))
    True
    """
    weight, positive = (_setting(loss_fn, name, None) for name in ("weight", "pos_weight"))
    if isinstance(positive, torch.Tensor) and bool((positive != 1).any()):
        return True
    return (
        isinstance(weight, torch.Tensor) and weight.ndim == 1 and bool((weight != weight[0]).any())
    )


def counting_targets(loss_fn: LossFn, targets: Any) -> float | None:
    """Return the number of targets over which a classification loss is the mean; None if that is not known.

    Ignored targets do not count. If classes have weights, each target counts with the weight of its class.

    >>> targets = torch.tensor([[0, 1, -100], [1, -100, -100]])
    >>> counting_targets(cross_entropy, targets), counting_targets(nn.functional.mse_loss, targets)
    (3.0, None)
    >>> counting_targets(nn.CrossEntropyLoss(torch.tensor([1.0, 9.0])), targets)
    19.0
    """
    own = loss_fn is own_loss
    if is_summed(loss_fn) or not (own or is_of_classes(loss_fn)):
        return None
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.is_nested:
        return None
    known = targets[~is_ignored(targets, ignored_class(loss_fn))].long()
    weight = _setting(loss_fn, "weight", None)
    return float(known.numel() if weight is None else weight.to(known.device)[known].sum())


def weight_in_mean(loss_fn: LossFn, targets: Any, examples: int) -> float:
    """Return the weight of a batch's loss in the mean over several batches, as if all were one batch.

    The weight is the number of targets over which a classification loss is averaged; for any other loss it is
    ``examples``.

    >>> weight_in_mean(cross_entropy, torch.tensor([[0, 1, -100], [1, -100, -100]]), 2)
    3.0
    >>> weight_in_mean(nn.functional.mse_loss, torch.zeros(2, 3), 2)
    2.0
    """
    counting = counting_targets(loss_fn, targets)
    return float(examples) if counting is None else counting


def _setting(loss_fn: LossFn, name: str, default: Any) -> Any:
    given = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    return given.get(name, getattr(loss_fn, name, default))


def is_of_classes(loss_fn: LossFn) -> bool:
    """Return whether a loss is known to be torch's cross-entropy, or a partial or class derived from it."""
    if isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    return isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) or loss_fn in _OF_CLASSES
