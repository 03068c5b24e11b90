"""What a task's data asks for."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any

from fl_elastic.errors import BudgetError, TrainingError
from fl_elastic.training.batches import loader_size

if TYPE_CHECKING:
    from fl_elastic_simulations.peers.base import LocalTask

__all__ = ["everything_fits", "first_batch", "num_examples", "requested_steps", "steps_in_time"]


def first_batch(task: LocalTask) -> Any:
    """Return the client's first batch.

    Raises
    ------
    TrainingError
        If there is none.
    """
    batch = next(islice(iter(task.batches), 1), None)
    if batch is None:
        raise TrainingError("the loader gave no batch: check the client's data and batch size")
    return batch


def requested_steps(task: LocalTask) -> int:
    """Return the steps that the task's epochs ask for."""
    return loader_size(task.batches, first_batch(task)).batches * task.epochs


def num_examples(task: LocalTask) -> int:
    """Return how many examples the client has."""
    return loader_size(task.batches, first_batch(task)).examples


def everything_fits(task: LocalTask) -> bool:
    """Whether all steps of the whole model fit, which a client knows from the time of its steps alone."""
    if math.isinf(task.allowed_seconds):
        return True
    needed = requested_steps(task) * task.profile.full_step_seconds
    return needed <= task.allowed_seconds * (1 + 1e-9)


def steps_in_time(task: LocalTask, step_seconds: float, spent: float = 0.0) -> int:
    """Return how many of the task's steps fit its time once ``spent`` seconds of it are gone.

    Raises
    ------
    BudgetError
        If not even one does.
    """
    requested = requested_steps(task)
    if math.isinf(task.allowed_seconds):
        return requested
    left = task.allowed_seconds - spent
    steps = min(requested, math.floor(left / step_seconds + 1e-9))
    if steps < 1:
        raise BudgetError(
            f"{max(left, 0.0):.3g} s do not pay for one step of {step_seconds:.3g} s: allow more time, or leave "
            "this device out of the round"
        )
    return steps
