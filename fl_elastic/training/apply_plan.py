"""Make a model train by a plan, and leave it as it was before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from fl_elastic.errors import PlanError
from fl_elastic.groups.torch_private import (
    has_hooks,
    spared_group_norms,
    uncompiled,
)
from fl_elastic.groups.trainable import flags_kept
from fl_elastic.planning import Plan
from fl_elastic.planning.step_transform import StepGuard
from fl_elastic.training.frozen_norms import frozen_norms, held_in_eval
from fl_elastic.training.still_parameters import StillThroughSteps


@contextmanager
def apply_plan(
    model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Train exactly as ``plan`` says inside the block, with any training loop; the model is restored afterwards.

    Parameters that the plan does not train have no gradient inside. `fl_elastic.training.changed` returns the
    changes.

    Parameters
    ----------
    model : nn.Module
        The model that the plan was made for. A model compiled by ``torch.compile`` is recompiled once per plan.
    plan : Plan
        For example from `fl_elastic.training.plan_for`.
    optimizer : torch.optim.Optimizer, optional
        The optimiser of the loop. After each of its steps, what the plan does not train is put back: frozen
        parameters, if the optimiser is not torch's own, and the untrained channels of a layer trained by channels,
        which momentum and weight decay would move. Without it, channels are put back only on leaving the block.

    Raises
    ------
    PlanError
        If the plan is of another model, trains in windows, or trains by channels that are not chosen yet.

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
    guards = plan_guards(plan, model, optimizer=optimizer)
    with ExitStack() as stack:
        for guard in guards:
            stack.callback(guard.finalize)
            stack.callback(guard.put_back)
        stack.enter_context(plan_applied(plan, model))
        if optimizer is not None:
            still = StillThroughSteps(model, plan, optimizer)
            stack.enter_context(_around_steps(optimizer, still, guards))
        yield


@contextmanager
def _around_steps(
    optimizer: torch.optim.Optimizer, still: StillThroughSteps, guards: Sequence[StepGuard]
) -> Iterator[None]:
    """Put back, after each step inside the block, what is not trained."""

    def after() -> None:
        still.put_back()
        for guard in guards:
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
    for transform in plan.transforms:
        transform.check(model, plan)
    unknown = [mode for mode in plan.modes if mode.needs_operations]
    if unknown and plan.lean_layers is None:
        raise PlanError(
            f"the plan has mode {unknown[0]} but no layers that run it: make the plan with plan_for"
        )


def plan_guards(
    plan: Plan,
    model: nn.Module,
    copies: Mapping[str, NDArray[Any]] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[StepGuard]:
    """Return the guards that put untrained parts of tensors back after each step, see `StepTransform.guard`."""
    found = (each.guard(model, plan, copies, optimizer) for each in plan.transforms)
    return [guard for guard in found if guard is not None]


@contextmanager
def plan_applied(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Freeze the parameters outside the plan and apply its transforms, inside the block.

    Unlike `apply_plan`, this leaves the steps, and the guards around them, to the caller.
    """
    with ExitStack() as stack:
        stack.enter_context(frozen_outside(plan, model))
        for transform in plan.transforms:
            stack.enter_context(transform.applied(model, plan))
        yield


@contextmanager
def frozen_outside(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Train only what ``plan`` trains inside the block.

    Other parameters get ``requires_grad=False`` and no gradient, because an optimiser keeps moving a tensor that
    has a stale gradient. A frozen BatchNorm or InstanceNorm runs in eval mode, also after ``model.train()``: it
    neither uses nor updates batch statistics. On leaving, also by an exception, flags and modes are restored.
    """
    trained = set(plan.trained_parameters)
    parameters = dict(model.named_parameters())
    with flags_kept(parameters.values()):
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
            if name not in trained:
                parameter.grad = None
        with held_in_eval(model, frozen_norms(model, trained)), spared_group_norms(model):
            yield
