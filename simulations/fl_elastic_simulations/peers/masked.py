"""Train by the elastic trainer, with a choice of groups that a peer made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from fl_elastic.budget import Budget
from fl_elastic.planning import Plan, PlanRequest, Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.profile import Mask
from fl_elastic.profiling.profile_key import profile_key
from fl_elastic.training import ElasticTrainer, SelectionState, TrainerOptions
from fl_elastic.training.selection import Reselection
from fl_elastic_simulations.peers.base import LocalResult, LocalTask
from fl_elastic_simulations.peers.task_data import first_batch, requested_steps

__all__ = ["FixedMask", "costs_of", "mask_of", "train_by", "train_mask"]


class FixedMask(Policy):
    """Trains the groups that it was given.

    Parameters
    ----------
    name : str
        Whose choice it is.
    mask : array of bool, shape (N,)
        In backward order.
    """

    reduces_uplink = False
    needs_coverage = False

    def __init__(self, name: str, mask: Mask) -> None:
        self._name, self._mask = name, mask

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains these groups; a deadline is met with fewer steps."""
        return request.plan_of_mask(self._name, self._mask)


def train_mask(task: LocalTask, name: str, mask: Mask, *, epochs: int | None = None) -> LocalResult:
    """Train the groups in ``mask``, in as many steps as the task's time allows.

    Parameters
    ----------
    task : LocalTask
        What to train.
    name : str
        Of the peer.
    mask : array of bool, shape (N,)
        In backward order.
    epochs : int, optional
        Passes over the data instead of the task's.

    Raises
    ------
    BudgetError
        If the time does not pay for one step.
    """
    return train_by(task, FixedMask(name, mask), TrainerOptions(), epochs=epochs)


def train_by(
    task: LocalTask,
    policy: Policy,
    options: TrainerOptions,
    *,
    epochs: int | None = None,
    rules: Reselection | None = None,
) -> LocalResult:
    """Train with the groups that ``policy`` chooses.

    Steps are predicted by the task's costs and never timed against them, so that the outcome is reproducible;
    nothing is explored. Of a probe of importance, the host seconds hold its two passes.
    """
    deadline = None if math.isinf(task.allowed_seconds) else task.allowed_seconds
    trainer = ElasticTrainer(
        task.model,
        task.loss_fn,
        task.optimizer_fn,
        budget=Budget(deadline=deadline),
        policy="full",
        profile=costs_of(task),
        options=replace(
            options, timing=replace(options.timing, closed_loop=False), full_update_every=0
        ),
        state=SelectionState(rules=replace(rules or Reselection(), exploration=0.0)),
    )
    trainer.planner.policy = policy
    report = trainer.fit(task.batches, epochs or task.epochs)
    # The trainer predicts one full step per batch of a probe; a probe of one batch also passes over it twice.
    passes_left_out = len(report.plans) if trainer.planner.batches_needed == 1 else 0
    probing = passes_left_out * report.full_step_seconds if policy.needs.importance else 0.0
    return LocalResult(
        update=trainer.update(task.base_version),
        host_seconds=report.predicted_seconds + probing,
        steps=report.steps,
        requested_steps=requested_steps(task),
        step_seconds=report.step_seconds,
        loss=report.loss,
        choosing_seconds=report.choosing_seconds + probing,
    )


def costs_of(task: LocalTask) -> CostProfile:
    """Return the task's costs as those of this client's batches, whatever their size.

    A client with little data has a smaller first batch; measured again for it, costs would not compare
    between clients.
    """
    return replace(task.profile, key=profile_key(task.model, first_batch(task), task.optimizer_fn))


def mask_of(profile: CostProfile, groups: Any) -> Mask:
    """Return the mask of the groups with these indices."""
    mask = np.zeros(len(profile), dtype=bool)
    mask[list(groups)] = True
    return mask
