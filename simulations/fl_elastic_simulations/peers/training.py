"""Local training of peers: given groups by the elastic trainer, or plain steps of another model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import ElasticError, TrainingError
from fl_elastic.groups import LossFn
from fl_elastic.groups.forward import batch_shape, compute_loss
from fl_elastic.groups.loss_settings import weight_in_mean
from fl_elastic.planning import Plan, PlanRequest, Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.profile import Mask, model_device, profile_key
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic.training.batches import Epochs
from fl_elastic.update import Manifest, PartialUpdate, load_weights, weights_of
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    first_batch,
    num_examples,
    requested_steps,
)


class FixedMask(Policy):
    """A policy that trains the groups of a mask, for the peer of this name."""

    needs_coverage = False
    reduces_uplink = False

    def __init__(self, name: str, mask: Mask) -> None:
        self._name, self._mask = name, mask

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains these groups; a deadline is met by fewer steps."""
        return request.plan_of_mask(self._name, self._mask)


def train_mask(task: LocalTask, name: str, mask: Mask, *, epochs: int | None = None) -> LocalResult:
    """Train some groups with the elastic trainer, in as many steps as the task's time allows.

    The time of steps is predicted from the task's costs, not measured, so that the result is reproducible. Nothing
    is explored.

    Parameters
    ----------
    task : LocalTask
        The task.
    name : str
        Name of the peer that chose them.
    mask : array of bool, shape (N,)
        Groups to train, in backward order.
    epochs : int, optional
        Number of passes over the data; by default the task's.

    Raises
    ------
    BudgetError
        If the time does not suffice for one step.
    """
    deadline = None if math.isinf(task.allowed_seconds) else task.allowed_seconds
    trainer = ElasticTrainer(
        task.model,
        task.loss_fn,
        task.optimizer_fn,
        budget=Budget(deadline=deadline),
        policy=FixedMask(name, mask),
        profile=costs_of(task),
        options=TrainerOptions(timing=Timing(closed_loop=False), full_update_every=0),
    )
    report = trainer.fit(task.batches, epochs or task.epochs)
    return LocalResult(
        update=trainer.update(task.base_version),
        host_seconds=report.predicted_seconds,
        steps=report.steps,
        requested_steps=requested_steps(task),
        step_seconds=report.step_seconds,
        loss=report.loss,
        choosing_seconds=report.choosing_seconds,
    )


def costs_of(task: LocalTask) -> CostProfile:
    """Return the task's costs under the key of this client's batches, whatever their size.

    A client with little data has a smaller first batch. Costs measured again for it would not be comparable between
    clients.
    """
    return replace(task.profile, key=profile_key(task.model, first_batch(task), task.optimizer_fn))


def mask_of(profile: CostProfile, groups: Any) -> Mask:
    """Return the mask of the groups with these indices."""
    mask = np.zeros(len(profile), dtype=bool)
    mask[list(groups)] = True
    return mask


@dataclass(frozen=True)
class StepsTaken:
    """Result of a run of plain steps.

    Attributes
    ----------
    losses : tuple of float
        Loss of every step.
    counting : tuple of float
        Weight of every step's batch in a mean over examples.
    step_seconds : float
        Median time of a step with a batch as large as the first.
    """

    losses: tuple[float, ...]
    counting: tuple[float, ...]
    step_seconds: float

    @property
    def count(self) -> int:
        """Number of steps taken."""
        return len(self.losses)

    def last_loss(self, per_epoch: int) -> float:
        """Return the mean loss over the examples of the last ``per_epoch`` steps."""
        return statistics.fmean(self.losses[-per_epoch:], self.counting[-per_epoch:])

    def result(
        self,
        task: LocalTask,
        deltas: dict[str, NDArray[Any]],
        cost: float,
        *,
        choosing_seconds: float = 0.0,
    ) -> LocalResult:
        """Return the local result of these steps.

        Parameters
        ----------
        task : LocalTask
            The task to which they belong.
        deltas : dict of str to ndarray
            The changes that they made.
        cost : float
            Seconds of one step by the cost profile, for simulated time.
        choosing_seconds : float
            Additional seconds for choosing.
        """
        requested = requested_steps(task)
        return LocalResult(
            update=PartialUpdate(
                deltas=deltas,
                steps=dict.fromkeys(deltas, self.count),
                num_examples=num_examples(task),
                base_version=task.base_version,
            ),
            host_seconds=choosing_seconds + self.count * cost,
            steps=self.count,
            requested_steps=requested,
            step_seconds=self.step_seconds,
            loss=self.last_loss(requested // task.epochs),
            choosing_seconds=choosing_seconds,
        )


def take_steps(task: LocalTask, model: nn.Module, loss_fn: LossFn, steps: int) -> StepsTaken:
    """Train the parameters of ``model`` that require a gradient, for at most ``steps`` steps.

    Parameters
    ----------
    task : LocalTask
        Provides batches and optimiser.
    model : nn.Module
        Model to train in place, instead of the task's.
    loss_fn : callable
        Loss function, instead of the task's.
    steps : int
        Most steps; fewer are taken if the task's epochs end before.

    Raises
    ------
    TrainingError
        If there is no batch or a loss is not finite.
    """
    device = model_device(model)
    clock = clock_for(device)
    optimizer = task.optimizer_fn([p for p in model.parameters() if p.requires_grad])
    losses: list[float] = []
    counting: list[float] = []
    batches = Epochs(task.batches, task.epochs, device)
    shapes: list[tuple[int, ...]] = []
    seconds: list[float] = []
    for batch in islice(batches, steps):
        started = clock()
        optimizer.zero_grad(set_to_none=True)
        loss = compute_loss(model, loss_fn, batch)
        losses.append(loss.item())
        counting.append(weight_in_mean(loss_fn, batch[1], batches.counting))
        if not math.isfinite(losses[-1]):
            raise TrainingError(
                f"the loss is {losses[-1]}: check the batch for NaN and the learning rate; "
                "the model was put back to where the round started"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(clock() - started)
        shapes.append(batch_shape(batch))
    if not losses:
        raise TrainingError("the loader gave no batch: check the client's data and batch size")
    whole = [taken for taken, shape in zip(seconds, shapes, strict=True) if shape == shapes[0]]
    model.zero_grad(set_to_none=True)
    return StepsTaken(tuple(losses), tuple(counting), statistics.median(whole))


@contextmanager
def put_back_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the model's weights if the block raises an error of fl_elastic."""
    manifest = Manifest.of(model)
    before = weights_of(model, manifest)
    try:
        yield
    except ElasticError:
        load_weights(model, manifest, before)
        raise
