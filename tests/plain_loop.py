"""The loop that everybody writes, and the comparison with where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], Tensor] = cross_entropy,
) -> None:
    """One step a batch."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.autograd.backward(loss_fn(model(inputs), targets))
        optimizer.step()


def assert_weights(
    model: nn.Module, expected: nn.Module | Mapping[str, Tensor], **tolerance: float
) -> None:
    """Each tensor that is expected is in the model's state, about equal to it."""
    state = expected.state_dict() if isinstance(expected, nn.Module) else expected
    for name, value in state.items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name, **tolerance)
