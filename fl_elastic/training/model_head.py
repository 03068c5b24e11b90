"""The head of a model in closed form: solve for it on the device's data, and write a head into the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from fl_elastic.closed_form.head import ClosedFormHead, closed_form_head
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import LossFn
from fl_elastic.groups.model_state import ModelState
from fl_elastic.training.head_pass import head_sums
from fl_elastic.training.last_layer import LastLayer


def solve_head(
    model: nn.Module,
    loader: Iterable[Batch],
    running: Callable[[Batch], AbstractContextManager[None]] | None = None,
    loss_fn: LossFn | None = None,
) -> tuple[ClosedFormHead, str]:
    """Solve for the head in closed form and write it into the model; return it and the name of its weight.

    Parameters
    ----------
    model, loader, running, loss_fn
        See `head_sums`.

    Raises
    ------
    TrainingError
        If the model does not end in a linear layer, targets do not fit it, or data are missing or not finite.

    Examples
    --------
    >>> model = nn.Linear(1, 2)
    >>> data = [(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1]))]
    >>> solve_head(model, data)[1], model(torch.tensor([[0.0], [3.0]])).argmax(1).tolist()
    ('weight', [0, 1])
    """
    sums = head_sums(model, loader, running=running, loss_fn=loss_fn)
    head = closed_form_head(sums, intercept=_layer_of(model, sums.weight).bias is not None)
    put_head(model, head, sums.weight)
    return head, sums.weight


def refuse_frozen_head(model: nn.Module, weight: str, names: Collection[str]) -> None:
    """Raise TrainingError unless the head's weight, and its bias if it has one, are tensors that travel."""
    bias = weight.removesuffix("weight") + "bias"
    for name in (weight, bias):
        if name not in names and name in {weight, *ModelState.of(model).tensors}:
            raise TrainingError(
                f"{name!r} of the head belongs to the model's frozen base, so no server can solve for it: set its "
                "requires_grad, or give the server RoundConfig(read='none')"
            )


def put_head(model: nn.Module, head: ClosedFormHead, weight: str) -> None:
    """Write a head into the linear layer whose weight has this name."""
    layer = _layer_of(model, weight)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(head.weight).reshape(layer.weight.shape))
        if layer.bias is not None:
            layer.bias.copy_(torch.from_numpy(head.bias))


def _layer_of(model: nn.Module, weight: str) -> LastLayer:
    layer = model.get_submodule(ModelState.of(model).parameter_of(weight).rpartition(".")[0])
    assert isinstance(layer, LastLayer)
    return layer
