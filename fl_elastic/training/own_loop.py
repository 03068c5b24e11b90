"""Plans for the caller's own training loop, and the update that holds the loop's changes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.loss_settings import example_counter
from fl_elastic.groups.model_state import ModelState, wrapper_prefix
from fl_elastic.groups.torch_private import COMPILED, uncompiled
from fl_elastic.optimizers import KeptOptimizer, OptimizerFn
from fl_elastic.planning import Plan, Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.changes import changes, trained_parts
from fl_elastic.training.costs import costs_for, planned_with
from fl_elastic.training.loader import first_batches
from fl_elastic.training.options import TrainerOptions
from fl_elastic.training.planner import Planner
from fl_elastic.training.selection import SelectionState
from fl_elastic.update import Manifest, PartialUpdate

_LOG = logging.getLogger("fl_elastic")


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def plan_for(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Batch],
    *,
    budget: Budget,
    policy: str | Policy = "elastic",
    optimizer_fn: OptimizerFn = _sgd,
    steps: int = 1,
    profile: CostProfile | None = None,
    options: TrainerOptions | None = None,
    state: SelectionState | None = None,
) -> Plan:
    """Return the plan of a policy under a budget, for `apply_plan`; the model is left as it is.

    Costs are estimated on the first batch (about one and a half steps) unless a profile that fits is given.
    Importance is measured on all batches (a probe of two batches takes about two steps).

    If even the cheapest step does not fit, or costlier steps are worth more under a deadline, the budget is kept by
    fewer steps: take at most ``plan.step_fraction`` of the intended steps. A warning says so.

    Parameters
    ----------
    model : nn.Module
        On the device that it is trained on.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    batches : sequence of batches
        Batches like those of the training; two for the default importance. Those without examples are left out.
    budget : Budget
        A deadline is for all steps together.
    policy : str or Policy
        A registered name, or an object with options of its own.
    optimizer_fn : callable
        ``optimizer_fn(parameters)`` returns the kind of optimiser that will train.
    steps : int
        Number of steps that share a deadline.
    profile : CostProfile, optional
        Costs, measured by `fl_elastic.profiling.profile_model`.
    options : TrainerOptions, optional
        The part that may be trained (``part``), importance, seed, and the batches of a step (``accumulate``).
    state : SelectionState, optional
        Scores of earlier measurements; the new ones are added to it.

    Raises
    ------
    TrainingError
        If there are fewer batches than importance needs, or an option prescribes how steps are taken.
    PlanError
        If the model has no group at the cut.
    BudgetError
        If memory or uplink do not even suffice for the head.
    """
    model = uncompiled(model)
    options, optimizer = options or TrainerOptions(), KeptOptimizer(model, optimizer_fn)
    planner = Planner(
        model, loss_fn, policy=policy, budget=budget, options=options,
        state=state or SelectionState(), optimizer=optimizer,
    )  # fmt: skip
    if not isinstance(batches, Sequence):
        raise TrainingError(
            f"batches is of type {type(batches).__name__}: pass a list of batches, such as "
            "list(islice(loader, 2))"
        )
    if batches and isinstance(batches[0], Tensor):
        raise TrainingError(
            "batches is one batch, of inputs and targets: pass a list of batches, such as [first, second]"
        )
    if batches:
        # As in a trainer, batches without an example, or without a target that counts, are left out.
        counter = example_counter(loss_fn, options.count_examples)
        batches = first_batches(batches, len(batches), model_device(model), counter)
    if len(batches) < planner.batches_needed:
        raise TrainingError(
            f"policy {policy!r} with importance {options.importance!r} needs {planner.batches_needed} "
            f"batches with examples, {len(batches)} were given"
        )
    _refuse_step_options(options)
    whole = costs_for(
        planner.policy, profile, model, loss_fn, batches[0],
        optimizer_fn=optimizer_fn, budget=budget, options=options,
    )  # fmt: skip
    whole = whole.accumulated(options.accumulate)
    above = whole.graph.groups_above(options.part.cut) if options.part.cut else None
    planner.begin(
        planned_with(whole, None, above, options.part.kept_head), steps, batches, whole=whole
    )
    if planner.policy.needs.importance:
        planner.measure_importance(batches[: planner.batches_needed])
    plan = planner.plan(1.0)
    planner.state.memory = planner.memory
    if plan.step_fraction < 1:
        _LOG.warning(
            "a step of this plan takes %.3g s, the budget allows %.3g s: take %s of the steps (Plan.step_fraction)",
            plan.predicted_step_seconds, plan.allowed_step_seconds, f"{plan.step_fraction:.1%}",
        )  # fmt: skip
    return plan


def _refuse_step_options(options: TrainerOptions) -> None:
    """Raise TrainingError for options on how steps are taken, which the caller's loop decides."""
    usual = TrainerOptions()
    given = {
        "forward": options.forward != usual.forward,
        "proximal": options.proximal != usual.proximal,
        "keep_statistics": options.part.keep_statistics,
    }
    for name, is_given in given.items():
        if is_given:
            raise TrainingError(
                f"option {name!r} determines how steps are taken, which your own loop does: leave it out, or use "
                "ElasticTrainer"
            )


def changed(
    model: nn.Module,
    base: Mapping[str, Tensor],
    plan: Plan,
    *,
    steps: int,
    num_examples: int,
    base_version: int = 0,
) -> PartialUpdate:
    """Return the changes of a training loop under a plan, as an update for the server.

    Parameters
    ----------
    model : nn.Module
        After training.
    base : mapping of str to tensor
        The state before training: ``{name: value.clone() for name, value in model.state_dict().items()}``.
    plan : Plan
        The plan of the training.
    steps : int
        Optimiser steps taken.
    num_examples : int
        Number of examples in these steps, each counted once.
    base_version : int
        Version of the global model in ``base``.

    Raises
    ------
    TrainingError
        If ``base`` lacks a tensor, or a trained tensor is no longer finite.
    """
    model = uncompiled(model)
    prefix = wrapper_prefix(model)
    base = {n.removeprefix(COMPILED).removeprefix(prefix): value for n, value in base.items()}
    manifest = Manifest.of(model)
    missing = [name for name in manifest.names if name not in base]
    if missing:
        raise TrainingError(f"base lacks {missing[0]!r}: take it from model.state_dict() before")
    state = ModelState.of(model).tensors
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {id(parameters[name]) for name in plan.trained_parameters}
    counts = {
        name: steps
        for name in manifest.names
        if id(state[name]) in trained or _moved(state[name], base[name])
    }
    before = {name: _as_array(base[name]) for name in counts}
    parts = trained_parts([plan], model)
    return PartialUpdate(
        deltas=changes(model, manifest, before, counts),
        steps=counts,
        num_examples=num_examples,
        base_version=base_version,
        parts={name: part for name, part in parts.items() if name in counts},
    )


def _moved(now: Tensor, before: Tensor) -> bool:
    return now.is_floating_point() and not torch.equal(now, before.to(now.device))


def _as_array(value: Tensor) -> Any:
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
