"""Run a block of a model again in the backward pass instead of keeping what it held, as gradient checkpoints do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fl_elastic.groups.torch_private import NormWithStatistics, own_buffers
from fl_elastic.groups.untouched import Chances

__all__ = ["recomputed"]

_Buffers = list[tuple[dict[str, Any], str, Tensor]]


@contextmanager
def recomputed(module: nn.Module) -> Iterator[None]:
    """Keep of a block its input alone inside the block; what it draws and its statistics are as if it ran once."""
    plain = module.forward
    before = [(module, module.__dict__.get("forward"))]

    def forward(x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return plain(x)
        chances, buffers = Chances.now(), _other_buffers(module)
        return checkpoint(
            plain,
            x,
            use_reentrant=False,
            context_fn=lambda: (ExitStack(), _as_before(module, chances, buffers)),
        )

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        _put_back(before)


def _other_buffers(module: nn.Module) -> _Buffers:
    """Return copies of the buffers of all but torch's norms, with where each is held."""
    return [
        (own_buffers(inner), name, buffer.detach().clone())
        for inner in module.modules()
        if not isinstance(inner, NormWithStatistics)
        for name, buffer in own_buffers(inner).items()
        if buffer is not None
    ]


@contextmanager
def _as_before(module: nn.Module, chances: Chances, buffers: _Buffers) -> Iterator[None]:
    """Let a block run again as it ran, also where its own statistics and its draws have moved on since."""
    now, held = Chances.now(), [own[name] for own, name, _ in buffers]
    # Other tensors for the while: the values of one that the backward pass needs must not be written.
    for own, name, before in buffers:
        own[name] = before
    chances.put_back()
    try:
        with _still_norms(module):
            yield
    finally:
        now.put_back()
        for (own, name, _), value in zip(buffers, held, strict=True):
            own[name] = value


@contextmanager
def _still_norms(module: nn.Module) -> Iterator[None]:
    """Keep running statistics from moving a second time while a block runs again."""
    norms = [
        m for m in module.modules() if isinstance(m, NormWithStatistics) and m.track_running_stats
    ]
    moving = [(norm, norm.momentum) for norm in norms if norm.training]
    counts = [(n.num_batches_tracked, n.num_batches_tracked.clone()) for n, _ in moving
              if n.num_batches_tracked is not None]  # fmt: skip
    for norm, _ in moving:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in moving:
            norm.momentum = momentum
        for count, value in counts:
            count.copy_(value)


def _put_back(before: list[tuple[nn.Module, Any]]) -> None:
    for module, forward in reversed(before):
        if forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = forward
