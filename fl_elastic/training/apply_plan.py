"""Apply a plan to a model: freeze all weights that it does not train, and restore the model afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.groups.torch_private import (
    NormWithStatistics,
    has_hooks,
    spared_group_norms,
    uncompiled,
)
from fl_elastic.groups.trainable import flags_kept, trainable
from fl_elastic.groups.untouched import modes_kept
from fl_elastic.optimizers import moves_by_gradient
from fl_elastic.planning import Plan
from fl_elastic.planning.step_transform import StepGuard


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
        The optimiser of the loop. After each of its steps, untrained weights get their old values back: frozen
        parameters, if the optimiser is not torch's own, and the untrained channels of a layer trained by channels,
        which momentum and weight decay would move. Without it, channels are restored only on leaving the block.

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
            stack.enter_context(_around_steps(optimizer, guards))
        yield


@contextmanager
def _around_steps(optimizer: torch.optim.Optimizer, guards: Sequence[StepGuard]) -> Iterator[None]:
    """Restore untrained weights after each step of the optimiser inside the block."""

    def before() -> None:
        for guard in guards:
            guard.remember()

    def after() -> None:
        for guard in guards:
            guard.put_back()

    if has_hooks(optimizer):
        pre_hook = optimizer.register_step_pre_hook(lambda *_: before())
        hooks = pre_hook, optimizer.register_step_post_hook(lambda *_: after())
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        return
    own, plain = vars(optimizer), optimizer.step
    known = own.get("step")

    def step(*arguments: Any, **keywords: Any) -> Any:
        before()
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
    """Return the guards that restore, after each step of the optimiser, the weights that the plan does not train.

    They are those of the plan's transforms (`StepTransform.guard`), and one for whole tensors.
    """
    whole = None if optimizer is None else FrozenGuard(model, plan, optimizer)
    found = (transform.guard(model, plan, copies, optimizer) for transform in plan.transforms)
    return [guard for guard in (whole, *found) if guard is not None]


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


class FrozenGuard:
    """Keeps the tensors that a plan does not train unchanged, bit by bit, through the steps of any optimiser.

    Torch's own optimisers do not move a parameter without a gradient. Others may treat a missing gradient as zeros,
    so that momentum and decay move the parameter, or may follow other rules: then values are copied before each
    step and put back after it.

    Parameters
    ----------
    model : nn.Module
        The model in training.
    plan : Plan
        The plan it is trained by.
    optimizer : torch optimiser
        The optimiser that takes the steps.

    Attributes
    ----------
    still : list of Parameter
        Parameters that are put back: those that the optimiser drives or may know. Parameters that the owner froze
        are not among them.
    """

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        trained = {id(model.get_parameter(name)) for name in plan.trained_parameters}
        moves_others = not moves_by_gradient(optimizer)
        driven = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.still = [
            parameter
            for parameter in (model.parameters() if moves_others else ())
            if id(parameter) not in trained and (id(parameter) in driven or trainable(parameter))
        ]
        self._values: list[Tensor] = []
        self._within = 0

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the untrained parameters before a step; nested steps, as in a derived class, share one copy."""
        if not self._within:
            self._values = [each.detach().clone() for each in self.still]
        self._within += 1

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the parameters that a step has moved and drop their gradients, if a step has begun."""
        if not self._within:
            return
        for parameter, value in zip(self.still, self._values, strict=True):
            if not torch.equal(parameter, value):
                parameter.copy_(value)
            parameter.grad = None
        self._within -= 1
        if not self._within:
            self._values = []

    def finalize(self) -> None:
        """Do nothing: the optimiser keeps its state for untrained parameters."""


def frozen_norms(model: nn.Module, trained: set[str]) -> list[nn.Module]:
    """Return the norms that have running statistics, and no parameter whose name is in ``trained``."""
    norms: list[nn.Module] = []
    for prefix, module in model.named_modules():
        if isinstance(module, NormWithStatistics):
            own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
            if own and not any(name in trained for name in own):
                norms.append(module)
    return norms


@contextmanager
def held_in_eval(model: nn.Module, norms: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Run norms with their present statistics inside the block, also after ``model.train()``; restore all modes.

    Parameters
    ----------
    model : nn.Module
        The model whose modes are restored.
    norms : sequence of nn.Module, optional
        The norms to hold; by default all that have statistics.
    """
    if norms is None:
        norms = [module for module in model.modules() if isinstance(module, NormWithStatistics)]
    before = [(norm, norm.__dict__.get("train")) for norm in norms]
    with modes_kept(model):
        for norm in norms:
            norm.eval()
            # An instance attribute shadows the method, so that model.train() does not change this module.
            norm.__dict__["train"] = _StaysInEval(norm)
        try:
            yield
        finally:
            for norm, shadow in before:
                norm.__dict__.pop("train", None)
                if shadow is not None:
                    norm.__dict__["train"] = shadow


class _StaysInEval:
    """Replaces the ``train`` method of a norm by one that does nothing."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm

    def __call__(self, mode: bool = True) -> nn.Module:
        del mode
        return self._norm
