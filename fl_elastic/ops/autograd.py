"""Shared by custom autograd functions: they keep nothing without gradients, and refuse second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_elastic.errors import TrainingError


def apply_function(function: type[Function], *arguments: Any) -> Tensor:
    """Return ``function.apply(*arguments)``, the one output of a custom autograd function.

    While gradients are disabled, the function gets detached tensors, so that it keeps nothing for a backward pass.
    Torch itself would still pass tensors that require gradients.
    """
    if not torch.is_grad_enabled():
        arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
    output: Tensor = function.apply(*arguments)
    return output


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a custom autograd function's backward pass, changed to raise an error if it is differentiated.

    Torch's decorator of this name raises no error if the incoming gradient is a constant, such as the gradient of a
    sum. But the outgoing gradient depends on weights and activations, and a second derivative would silently lack
    this part.
    """

    @wraps(backward)
    def once(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        outputs = found if isinstance(found, tuple) else (found,)
        given = [output.detach().requires_grad_() for output in outputs if output is not None]
        marked = iter(_NoSecond.apply(*given))
        return tuple(None if output is None else next(marked) for output in outputs)

    return once


class _NoSecond(Function):
    @staticmethod
    def forward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise TrainingError(
            "a gradient was differentiated again, as for a gradient penalty, but the layers that save memory under "
            "a plan, or train a part of a weight, have no second derivative: plan without a memory budget, "
            "with policy 'elastic' or 'full'"
        )
