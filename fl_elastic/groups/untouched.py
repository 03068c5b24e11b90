"""Run forward and backward passes that leave the model and the random state as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["untouched"]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients, ``requires_grad``, training modes and RNG on leaving the block.

    Weights are not copied: the block must not write to them. Gradients start as ``None`` inside.

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
    assigned = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in parameters if p.device.type == "cuda"})
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for own, names in assigned:
            own.clear()
            own.update(names)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient, flag in zip(parameters, gradients, trainable, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
