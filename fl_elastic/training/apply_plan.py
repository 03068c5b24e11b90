"""Make a model train by a plan: frozen, lean, filtered, channel-wise and recomputed parts; then undo it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import GroupKind
from fl_elastic.groups.held_state import Attributes
from fl_elastic.groups.torch_private import NormWithStatistics, has_hooks, own_buffers, uncompiled
from fl_elastic.groups.untouched import Chances
from fl_elastic.planning import Plan
from fl_elastic.training.frozen import ChannelGuard, StillThroughSteps, frozen_outside

__all__ = ["apply_plan", "realised"]

_Buffers = list[tuple[dict[str, Any], str, Tensor]]


@contextmanager
def apply_plan(
    model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Train exactly as ``plan`` says inside the block, by whatever loop; afterwards the model is as before.

    What the plan does not train has no gradient inside. What it changed, says `fl_elastic.training.changed`.

    Parameters
    ----------
    model : nn.Module
        The one that the plan was made for. One that ``torch.compile`` gave is compiled anew for each plan, once.
    plan : Plan
        For example of `fl_elastic.training.plan_for`.
    optimizer : torch.optim.Optimizer, optional
        Whose steps train. What they would move besides is put back after each of them: all that is frozen, where it
        is not torch's own, and the other channels of a layer that is trained by some, which momentum and weight
        decay would move; the latter on leaving the block without it. Where the plan
        `erases_momentum`, that of what is frozen is erased.

    Raises
    ------
    PlanError
        If the plan is of another model, trains by channels that are not chosen, or in windows.

    Examples
    --------
    >>> from fl_elastic.budget import Budget
    >>> from fl_elastic.training import plan_for
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> batches = [(torch.randn(4, 4), torch.tensor([0, 1, 0, 1])) for _ in range(2)]
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plan = plan_for(model, nn.functional.cross_entropy, batches, budget=Budget(), policy="head")
    >>> with apply_plan(model, plan, optimizer):
    ...     for inputs, targets in batches:
    ...         optimizer.zero_grad()
    ...         nn.functional.cross_entropy(model(inputs), targets).backward()
    ...         optimizer.step()
    >>> plan.trained_parameters
    ('2.weight', '2.bias')
    """
    model = uncompiled(model)
    _check(model, plan)
    guard = ChannelGuard(plan, model, optimizer=optimizer if plan.erases_momentum else None)
    with ExitStack() as stack:
        stack.callback(guard.settle)
        stack.callback(guard.put_back)
        stack.enter_context(realised(plan, model))
        if optimizer is not None:
            still = StillThroughSteps(model, plan, optimizer)
            stack.enter_context(_around_steps(optimizer, still, guard))
        yield


@contextmanager
def _around_steps(
    optimizer: torch.optim.Optimizer, still: StillThroughSteps, guard: ChannelGuard
) -> Iterator[None]:
    """Put back after each step inside the block what is not trained."""

    def after() -> None:
        still.put_back()
        guard.put_back()

    if has_hooks(optimizer):
        before = optimizer.register_step_pre_hook(lambda *_: still.remember())
        hooks = before, optimizer.register_step_post_hook(lambda *_: after())
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        return
    own, plain = vars(optimizer), optimizer.step
    known = own.get("step")

    def step(*arguments: Any, **keywords: Any) -> Any:
        still.remember()
        try:
            return plain(*arguments, **keywords)
        finally:
            after()

    own["step"] = step
    try:
        yield
    finally:
        del own["step"]
        if known is not None:
            own["step"] = known


def _check(model: nn.Module, plan: Plan) -> None:
    known = dict(model.named_parameters())
    for name in plan.trained_parameters:
        if name not in known:
            raise PlanError(
                f"the plan trains {name!r}, which this model does not have: make a plan for this model"
            )
    if plan.windows is not None:
        raise PlanError(
            f"policy {plan.policy!r} trains in windows of channels, which ElasticTrainer opens for each step: "
            "train with it, or by another policy"
        )
    for group, mode in zip(plan.groups, plan.modes, strict=True):
        if mode.kind == "channels" and group.name not in plan.channels:
            raise PlanError(
                f"the plan trains channels of {group.name!r} that were not chosen: make it with plan_for"
            )


@contextmanager
def realised(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Do what `apply_plan` does, but leave the channels that are not trained to the caller's `ChannelGuard`.

    Parameters outside of the plan are frozen. Layers that are trained by channels or with filtered gradients, and
    all layers of a lean plan, run by `fl_elastic.ops` where it applies and as ever elsewhere.
    """
    with ExitStack() as stack:
        stack.enter_context(frozen_outside(plan, model))
        modes = _modes_by_module(plan)
        if modes or plan.lean:
            # Plans that train layers whole, with memory to spare, do not load the others.
            from fl_elastic.ops.lean import lean

            joins = any(mode.filters_input for mode in modes.values())
            stack.enter_context(
                lean(
                    model,
                    modes,
                    _channels_by_module(plan),
                    joins=joins,
                    only_named=not plan.lean,
                )
            )
        if plan.tokens is not None:
            # Of transformers alone: other fits do not load it.
            from fl_elastic.training.kept_tokens import on_kept_tokens

            stack.enter_context(on_kept_tokens(model, plan))
        for name in plan.recomputed:
            stack.enter_context(_recomputed(model.get_submodule(name)))
        yield


def _modes_by_module(plan: Plan) -> dict[str, Mode]:
    """Return the modes that torch's own layers do not offer, by the module that owns the group."""
    found = {}
    for layers, mode, group in zip(plan.layers, plan.modes, plan.groups, strict=bool(plan.layers)):
        if group.kind is GroupKind.NORM:
            # Gradients of its entries come with the error gradient: a part of them costs what all do.
            continue
        once = len(layers) == 1 and mode.kind in ("channels", "filtered")
        # A bias alone needs no input, however often its layer runs.
        for layer in layers if once or (plan.lean and mode.kind == "bias") else ():
            if layer:
                found[layer] = mode
    return found


def _channels_by_module(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {
        layers[0]: plan.channels[group.name]
        for layers, group in zip(plan.layers, plan.groups, strict=bool(plan.layers))
        if group.name in plan.channels and group.kind is not GroupKind.NORM
    }


@contextmanager
def _recomputed(module: nn.Module) -> Iterator[None]:
    """Keep of a block its input alone inside the block; what it draws and its statistics are as if it ran once."""
    plain = module.forward
    before = [(module, module.__dict__.get("forward"))]

    def forward(x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return plain(x)
        chances, buffers, held = Chances.now(), _other_buffers(module), Attributes.of(module)
        return checkpoint(
            plain,
            x,
            use_reentrant=False,
            context_fn=lambda: (ExitStack(), _as_before(module, chances, buffers, held)),
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
def _as_before(
    module: nn.Module, chances: Chances, buffers: _Buffers, attributes: Attributes
) -> Iterator[None]:
    """Let a block run again as it ran, also where its statistics, its state and its draws have moved on since."""
    now, held = Chances.now(), [own[name] for own, name, _ in buffers]
    moved_on = Attributes.of(module)
    attributes.put_back()
    # Other tensors for the while: the values of one that the backward pass needs must not be written.
    for own, name, before in buffers:
        own[name] = before
    chances.put_back()
    try:
        with _still_norms(module):
            yield
    finally:
        now.put_back()
        moved_on.put_back()
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
