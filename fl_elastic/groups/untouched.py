"""Run forward and backward passes that leave the model and the random state as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.groups.torch_private import own_buffers, spared_group_norms

__all__ = ["Chances", "chances_kept", "same_chances", "untouched"]


@dataclass(frozen=True, eq=False)
class Chances:
    """Where the generators of torch, Python and numpy stand, from which models draw.

    Those of torch are the CPU's, and each GPU's once CUDA is in use.
    """

    of_torch: list[Tensor]
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> Chances:
        """Return where they stand."""
        states = [each.get_state() for each in _generators()]
        return cls(states, random.getstate(), np.random.get_state())

    def put_back(self) -> None:
        """Let the same numbers come again."""
        # CUDA may have come into use since.
        for generator, state in zip(_generators(), self.of_torch, strict=False):
            generator.set_state(state)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)

    def moved(self) -> bool:
        """Return whether anything was drawn since."""
        now = Chances.now()
        drawn = self.of_python != now.of_python or not all(
            map(torch.equal, self.of_torch, now.of_torch)
        )
        # numpy's state: name, keys, position, and the half of a normal pair.
        pairs = zip(self.of_numpy[1:], now.of_numpy[1:], strict=True)
        return drawn or not all(np.array_equal(a, b) for a, b in pairs)


def _generators() -> list[torch.Generator]:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *(torch.cuda.default_generators if in_use else ())]


@contextmanager
def chances_kept() -> Iterator[None]:
    """Put the generators back on leaving the block, so that nobody else draws other numbers for it.

    Examples
    --------
    >>> chances = Chances.now()
    >>> with chances_kept():
    ...     _ = torch.rand(3)
    >>> chances.moved()
    False
    """
    chances = Chances.now()
    try:
        yield
    finally:
        chances.put_back()


@contextmanager
def same_chances(model: nn.Module) -> Iterator[None]:
    """Let every forward pass inside the block draw the same random numbers.

    Passes that are compared, as those of a cost profile, then drop the same layers and units.
    """
    chances = Chances.now()
    handle = model.register_forward_pre_hook(lambda *_: chances.put_back())
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients, ``requires_grad``, training modes and RNG on leaving the block.

    Generators are those of torch, Python and numpy. Weights are not copied: the block must not write to them.
    Gradients start as ``None`` inside.

    Examples
    --------
    >>> model = nn.BatchNorm1d(2)
    >>> with untouched(model):
    ...     _ = model(torch.randn(4, 2))
    >>> model.num_batches_tracked.item()
    0
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    trainable = [parameter.requires_grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # A model may also assign new tensors to its buffers.
    assigned = [(own_buffers(module), dict(own_buffers(module))) for module in model.modules()]
    modes = [(module, module.training) for module in model.modules()]
    for parameter in parameters:
        parameter.grad = None
    try:
        with chances_kept(), spared_group_norms(model):
            yield
    finally:
        for own, names in assigned:
            own.clear()
            own.update(names)
        with torch.no_grad():
            for buffer, before in buffers:
                if buffer.shape != before.shape:
                    # As an observer does that has seen its first batch.
                    buffer.data = torch.empty_like(before)
                buffer.copy_(before)
        for parameter, gradient, flag in zip(parameters, gradients, trainable, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
