"""Time a plan's steps beside full steps, and correct the plan until it fits the budget."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.untouched import untouched
from fl_elastic.optimizers import OptimizerFn, made_by
from fl_elastic.planning import Plan, PlanRequest, Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.clock import Clock, clock_for
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.apply_plan import plan_applied, plan_guards

_TOLERANCE = 0.02
_TRIES = 4


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan, and the median seconds of its step and of a full step, timed in turn."""

    plan: Plan
    step_seconds: float
    full_step_seconds: float

    @property
    def speedup(self) -> float:
        """Measured time of a full step over that of the plan's step."""
        return self.full_step_seconds / self.step_seconds


def measure_plan(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    optimizer_fn: OptimizerFn,
    plan: Plan,
    *,
    repeats: int = 9,
    clock: str = "auto",
) -> MeasuredPlan:
    """Time ``repeats`` pairs of a full and a planned step; the model is left as it was."""
    everything = plan.full()
    timer = clock_for(model_device(model), clock)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with untouched(model, loss_fn):
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in trainable]
        optimizer = made_by(optimizer_fn, model)
        openers = [transform.opener(model, None) for transform in plan.transforms]
        opener = next((each for each in openers if each is not None), None)
        for repeat in range(repeats + 1):
            for full in (True, False):
                taken = everything if full else plan
                with plan_applied(taken, model):
                    guards = plan_guards(taken, model)
                    started = timer()
                    opened: AbstractContextManager[Any] = (
                        nullcontext() if full or opener is None else opener.step(optimizer, batch)
                    )
                    with opened:
                        _step(model, loss_fn, batch, optimizer)
                    for guard in guards:
                        guard.put_back()
                    if repeat:
                        seconds[full].append(timer() - started)
        with torch.no_grad():
            for parameter, value in zip(trainable, before, strict=True):
                parameter.copy_(value)
    return MeasuredPlan(plan, statistics.median(seconds[False]), statistics.median(seconds[True]))


def _step(
    model: nn.Module, loss_fn: LossFn, batch: Batch, optimizer: torch.optim.Optimizer
) -> None:
    optimizer.zero_grad(set_to_none=True)
    compute_loss(model, loss_fn, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def plan_measured(
    policy: Policy, request: PlanRequest, measure: Callable[[Plan], MeasuredPlan]
) -> MeasuredPlan:
    """Plan, measure, and plan again with the measured correction, until the budget is met.

    Returns the plan whose measured speed-up comes nearest to the requested one.
    """
    wanted = request.profile.full_step_seconds / (request.allowed_step_seconds * request.correction)
    best = measure(policy.plan(request))
    tried = {(best.plan.modes, best.plan.predicted_step_seconds)}
    for _ in range(_TRIES - 1):
        if not np.isfinite(wanted) or wanted <= 0 or abs(best.speedup / wanted - 1) <= _TOLERANCE:
            break
        request = replace(request, correction=request.correction * wanted / best.speedup)
        plan = policy.plan(request)
        found = plan.modes, plan.predicted_step_seconds
        if found in tried:
            break
        tried.add(found)
        best = min(best, measure(plan), key=lambda found: abs(found.speedup / wanted - 1))
    return best


def full_pass_ratio(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    profile: CostProfile,
    clock: Clock,
    optimizer_ratio: float = 1.0,
) -> float:
    """Return a full step's time over the profile's, from a forward and backward pass that trains everything.

    A full step also frees the gradients, a twentieth of its time for a layer of a hundred million weights; that is
    timed too. No weight moves: the optimiser's part is the profile's time for it times ``optimizer_ratio``.
    """
    optimizing = float(profile.optimizer_seconds.sum()) * optimizer_ratio
    with untouched(model, loss_fn):
        for group in profile.graph.groups:
            for name in group.parameters:
                model.get_parameter(name).requires_grad_(True)
        started = clock()
        compute_loss(model, loss_fn, batch).backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        return (clock() - started + optimizing) / profile.full_step_seconds
