"""Make a model train by a plan: lean layers, filtered and channel-wise gradients, recomputed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fl_elastic.groups import BackwardGraph, Mode
from fl_elastic.groups.untouched import Chances
from fl_elastic.ops import lean
from fl_elastic.planning import Plan
from fl_elastic.training.freeze import frozen_outside

__all__ = ["realised"]


@contextmanager
def realised(plan: Plan, model: nn.Module, graph: BackwardGraph) -> Iterator[None]:
    """Train exactly as ``plan`` says inside the block; afterwards the model is as before.

    Parameters outside of the plan are frozen. Layers that are trained by channels or with filtered gradients, and
    all layers of a lean plan, run by `fl_elastic.ops` where it applies and as ever elsewhere. Of a layer trained
    by channels, the other channels are put back after each step with `channels_kept`.
    """
    with ExitStack() as stack:
        stack.enter_context(frozen_outside(plan, model))
        modes = _modes_by_module(plan, graph)
        if modes or plan.lean:
            joins = any(mode.filters_input for mode in modes.values())
            stack.enter_context(
                lean(
                    model,
                    modes,
                    _channels_by_module(plan, graph),
                    joins=joins,
                    only_named=not plan.lean,
                )
            )
        for name in plan.recomputed:
            stack.enter_context(_recomputed(model.get_submodule(name)))
        yield


def _modes_by_module(plan: Plan, graph: BackwardGraph) -> dict[str, Mode]:
    """Return the modes that torch's own layers do not offer, by the module that owns the group."""
    found = {}
    for owners, mode in zip(graph.group_nodes(), plan.modes, strict=True):
        once = len(owners) == 1 and mode.kind in ("channels", "filtered")
        # A bias alone needs no input, however often its layer runs.
        for index in owners if once or (plan.lean and mode.kind == "bias") else ():
            if graph.nodes[index].module:
                found[graph.nodes[index].module] = mode
    return found


def _channels_by_module(plan: Plan, graph: BackwardGraph) -> dict[str, tuple[int, ...]]:
    return {
        graph.nodes[owners[0]].module: plan.channels[group.name]
        for owners, group in zip(graph.group_nodes(), plan.groups, strict=True)
        if group.name in plan.channels
    }


@contextmanager
def _recomputed(module: nn.Module) -> Iterator[None]:
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


_Buffers = list[tuple[dict[str, Any], str, Tensor]]


def _other_buffers(module: nn.Module) -> _Buffers:
    """Return copies of the buffers of all but torch's norms, with where each is held."""
    return [
        (inner._buffers, name, buffer.detach().clone())
        for inner in module.modules()
        if not isinstance(inner, _NormBase)
        for name, buffer in inner._buffers.items()
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
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
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
