"""Check what the owner of a model gives to train it: model, loss, optimiser, budget, passes."""

from __future__ import annotations

import logging

from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, ModelError, TrainingError
from fl_elastic.given import whole
from fl_elastic.groups.torch_private import uncompiled
from fl_elastic.optimizers import check_callable

_LOG = logging.getLogger("fl_elastic")
# Most names in a message.
_SHOWN = 4


def check_parts(model: nn.Module, loss_fn: object, optimizer_fn: object, budget: object) -> None:
    """Check the kinds of a trainer's arguments.

    Raises
    ------
    ModelError, TrainingError, BudgetError
        If one is of the wrong kind: a class instead of an object, an optimiser instead of a callable, a number.
    """
    uncompiled(model)
    if not callable(loss_fn):
        raise TrainingError(
            f"loss_fn {_kind_of(loss_fn)} cannot be called: give a function, such as cross_entropy"
        )
    check_callable(optimizer_fn)
    if isinstance(loss_fn, type):
        raise TrainingError(f"loss_fn {_kind_of(loss_fn)} is no function{_call_advice(loss_fn)}")
    if not isinstance(budget, Budget):
        raise BudgetError(
            f"budget {budget!r} is a {type(budget).__name__}, not a Budget: say for example "
            "Budget(speedup=2.0)"
        )


def _kind_of(given: object) -> str:
    """Describe a wrong argument in one line: a class by its name, any other object by its type."""
    return given.__name__ if isinstance(given, type) else f"of type {type(given).__name__}"


def _call_advice(given: object) -> str:
    return f" but a class: give {given.__name__}(...)" if isinstance(given, type) else ""


def eager(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was called on, with a warning; any other module as it is."""
    original = uncompiled(model)
    if original is not model:
        _LOG.warning(
            "the model is compiled, and its steps run without the compiler: each new plan would be compiled anew. "
            "A loop of one's own under apply_plan runs the compiled model"
        )
    return original


def say_what_loss_keeps(model: nn.Module, loss_fn: object) -> None:
    """Warn of weights of the loss, such as the centres of classes: they are in no plan and in no update."""
    if not isinstance(loss_fn, nn.Module):
        return
    known = {id(each) for each in model.parameters()}
    own = [n for n, p in loss_fn.named_parameters() if p.requires_grad and id(p) not in known]
    if own:
        _LOG.warning(
            "the loss has weights of its own (%s), which no plan trains and no update holds: to train and send "
            "them, make them part of the model", ", ".join(own[:_SHOWN]),
        )  # fmt: skip


def whole_epochs(epochs: object) -> int:
    """Return a number of epochs as int; raise TrainingError if it is not a positive whole number.

    >>> import numpy as np
    >>> whole_epochs(np.int64(2))
    2
    """
    found = whole(epochs)
    if found is None or found < 1 or isinstance(epochs, float):
        raise TrainingError(f"epochs {epochs!r} must be a whole number, at least 1")
    return found


def refuse_untrainable(model: nn.Module) -> None:
    """Raise ModelError for a model that no plan can train: no parameters, no values, or sparse gradients."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "the model has no trainable parameter: set requires_grad on what shall train"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"tensor {name!r} is on the meta device, without values: load the model's weights first"
            )
        if tensor.is_inference():
            raise ModelError(
                f"tensor {name!r} was made in inference mode and cannot be trained: build the model outside of "
                "torch.inference_mode()"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"layer {name!r} has sparse=True, whose gradients cannot be compared or merged: use sparse=False"
            )
