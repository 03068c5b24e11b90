"""One training step: loss, gradients, what pulls on them, optimiser."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import compute_loss
from fl_elastic.ops.split import MissedCut
from fl_elastic.planning import Plan
from fl_elastic.profiling.clock import Clock
from fl_elastic.training.channel_guard import ChannelGuard
from fl_elastic.training.elastic_forward import ElasticForward
from fl_elastic.training.kept_optimizer import KeptOptimizer
from fl_elastic.training.proximal import ProximalPull
from fl_elastic.training.step_importance import StepImportance

__all__ = ["TrainingStep"]

_TIMED = 5


class TrainingStep:
    """Takes the training steps of a fit, one batch each.

    Parameters
    ----------
    model : nn.Module
        Trained in place.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    optimizing : KeptOptimizer
        The trainer's optimiser.
    pull : ProximalPull
        Towards the weights that the fit started from.
    clock : callable
        Gives seconds.

    Attributes
    ----------
    forward : ElasticForward or None
        Runs what lies below the cut, where the forward pass is elastic.
    worth : StepImportance or None
        Reads importance from gradients, where steps tell it.
    optimizer_seconds : list of float
        What the optimiser took in the first steps by the present plan: on a GPU timing it holds a step up.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizing: KeptOptimizer,
        pull: ProximalPull,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.optimizer_seconds: list[float] = []
        self.model = model
        self.loss_fn = loss_fn
        self.optimizing = optimizing
        self.forward: ElasticForward | None = None
        self.worth: StepImportance | None = None
        self._pull = pull
        self._guard: ChannelGuard | None = None
        self._whole: tuple[int, ...] = ()

    def begin(self, plan: Plan, unmoved: Mapping[str, np.ndarray]) -> None:
        """Train by this plan from the next step on; ``unmoved`` are weights that no step has changed yet."""
        self._whole = tuple(i for i, mode in enumerate(plan.modes) if mode.kind == "full")
        self._guard = ChannelGuard(plan, self.model, unmoved)
        self.optimizer_seconds = []

    def take(self, batch: Batch) -> float:
        """Take one step and return its loss.

        Raises
        ------
        TrainingError
            If the loss is not finite.
        """
        optimizer = self.optimizing()
        optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        value = loss.item()
        if not np.isfinite(value):
            raise TrainingError(
                f"the loss is {value}: check the batch for NaN and the learning rate; "
                "the model was put back to where the fit started"
            )
        if not loss.requires_grad:
            # Nothing that the plan trains took part, as with routing: the batch is passed over.
            return value
        loss.backward()  # type: ignore[no-untyped-call]
        if self.worth is not None:
            self.worth.observe(self._whole)
        self._pull.add_to_gradients()
        timed = len(self.optimizer_seconds) < _TIMED
        started = self.clock() if timed else 0.0
        optimizer.step()
        if timed:
            self.optimizer_seconds.append(self.clock() - started)
        if self._guard is not None:
            self._guard.put_back()
        return value

    def _loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, on the features at the cut where there is one."""
        if self.forward is not None:
            try:
                with self.forward.step(batch):
                    return compute_loss(self.model, self.loss_fn, batch)
            except MissedCut as error:
                self.forward.go_whole(str(error))
        return compute_loss(self.model, self.loss_fn, batch)
