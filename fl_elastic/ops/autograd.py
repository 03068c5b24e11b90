"""Call a custom autograd function so that it keeps nothing where gradients are switched off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def apply_function(function: type[Function], *arguments: Any) -> Tensor:
    """Return ``function.apply(*arguments)``, the one output of a custom autograd function.

    While gradients are switched off, the function gets detached tensors, so that it keeps nothing for a backward
    pass. Torch itself passes tensors that require gradients then, too.
    """
    if not torch.is_grad_enabled():
        arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
    output: Tensor = function.apply(*arguments)
    return output
