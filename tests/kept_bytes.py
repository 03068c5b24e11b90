"""What a forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def kept_bytes(run: Callable[[], Any], *, besides: nn.Module | None = None) -> int:
    """Bytes of the distinct storages that ``run()`` saves, without parameters and buffers of ``besides``."""
    known = _own_places(besides)
    # The tensors are held, so that no storage's address is used twice.
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    del output
    # Also buffers that the pass assigned anew.
    known |= _own_places(besides)
    return sum(
        tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in known
    )


def _own_places(model: nn.Module | None) -> set[int]:
    tensors = () if model is None else (*model.parameters(), *model.buffers())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def gradients(
    run: Callable[..., Tensor], *tensors: Tensor, gradient: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The output of ``run(*tensors)`` on fresh leaves, and the gradients of all of them."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = run(*leaves)
    output.backward(torch.ones_like(output) if gradient is None else gradient)
    return output.detach(), [
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
    ]
