"""Report of one fit: the log of its steps, and its results."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from fl_elastic.errors import DivergedError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import batch_shape
from fl_elastic.planning import Plan
from fl_elastic.profiling.clock import Clock


class StepLog:
    """Times of the steps of one fit, and the tensors that they trained.

    Parameters
    ----------
    whole_batch : tuple of int
        Shape of the batches that enter step times; a smaller last batch would distort them.
    clock : callable
        Returns the time in seconds.
    began : float
        When the fit began.

    Attributes
    ----------
    began, made, ended : float
        When the fit began, when its first batches had been read, and when its last step was taken.
    losses, weights : list of float
        Loss of each step, and its weight in `mean_loss`.
    """

    def __init__(self, whole_batch: tuple[int, ...], clock: Clock, began: float) -> None:
        self.clock = clock
        self.began, self.made, self.ended = began, clock(), began
        self.losses: list[float] = []
        self.weights: list[float] = []
        self.tensor_steps: Counter[str] = Counter()
        self.seconds = 0.0
        self.selection_seconds = 0.0
        self.preparing_seconds = 0.0
        self.predicted_seconds = 0.0
        self.choosing_seconds = 0.0
        self._stepped = 0.0
        self._whole_batch = whole_batch
        self._whole_seconds: list[float] = []

    def step(self, batch: Batch, plan: Plan, loss: float, started: float) -> tuple[float, bool]:
        """Note the end of a step, or of one batch of it; return its seconds and whether its batch was whole."""
        self._stepped = self.clock()
        seconds = self._stepped - started
        self.losses.append(loss)
        whole = batch_shape(batch) == self._whole_batch
        if whole:
            self._whole_seconds.append(seconds)
        self.seconds += seconds
        self.predicted_seconds += plan.predicted_step_seconds
        return seconds, whole

    def count(self, tensors: Mapping[str, nn.Parameter], parts: Collection[int] = ()) -> None:
        """Count a step for the tensors that have a gradient, or whose id is in ``parts``."""
        self.tensor_steps.update(
            name
            for name, parameter in tensors.items()
            if parameter.grad is not None or id(parameter) in parts
        )

    def after_step(self) -> float:
        """Count the loop's time since the end of the step, and return it."""
        return self.since(self._stepped)

    def since(self, started: float) -> float:
        """Count the time since ``started`` as that of steps, and return it."""
        seconds = self.clock() - started
        self.seconds += seconds
        return seconds

    def mean_loss(self, steps: int, *, summed: bool) -> float:
        """Return the mean loss over the examples of the last steps, whose losses may be sums over a batch."""
        losses, weights = self.losses[-steps:], self.weights[-steps:]
        return (
            math.fsum(losses) / math.fsum(weights) if summed else statistics.fmean(losses, weights)
        )

    @property
    def median_step_seconds(self) -> float:
        """Median seconds of a step with a whole batch; 0 if there was none."""
        return statistics.median(self._whole_seconds) if self._whole_seconds else 0.0


@dataclass(frozen=True)
class ForwardReport:
    """Report on the elastic forward pass of one fit.

    Attributes
    ----------
    cut : str
        Module at whose output (or input) the last prefix ended; empty if no step had a frozen prefix.
    computed, found : int
        Examples whose prefix was computed, and found in the store.
    feature_bytes : int
        Bytes in the store at the end.
    prefix_seconds : float
        Time of computing prefixes.
    refused : str
        Why the prefix or its store was not used as asked; empty if it was.
    """

    cut: str
    computed: int
    found: int
    feature_bytes: int
    prefix_seconds: float
    refused: str

    def to_metrics(self) -> dict[str, int]:
        """Return the metrics about features in a client's reply."""
        return {"features-computed": self.computed, "features-found": self.found}


@dataclass(frozen=True)
class FitReport:
    """Plan, times, losses and other results of one call of `ElasticTrainer.fit`.

    Attributes
    ----------
    plan : Plan
        The plan in force at the end.
    plans : tuple of (int, Plan)
        Every plan with the step at which it came into force.
    steps, requested_steps : int
        Steps taken, and steps that loader and epochs asked for; fewer are taken if the budget is below the floor.
    seconds : float
        Time of the training steps, by the trainer's clock; under a deadline including the reading of their batches.
    selection_seconds : float
        All other time: estimating costs, probing importance, planning, full passes timed between the steps, and
        preparing.
    preparing_seconds : float
        The part of ``selection_seconds`` that prepares the fit and each of its plans: copies of what training
        changes, and layers put into their modes.
    predicted_seconds : float
        Time of steps and probes by the cost profile, plus what the options charge; for a virtual clock.
    choosing_seconds : float
        The part of ``predicted_seconds`` for probes and plans.
    step_seconds : float
        Median time of a step with a whole batch.
    full_step_seconds : float
        Time of a step that trains everything, by the cost profile that the fit began with.
    loss : float
        Mean loss over the last epoch's steps, weighted as in `evaluate`: by their examples, or targets, that count.
    losses : tuple of float
        Loss of every step.
    importance : dict
        Expected loss decrease per step if a group is trained, by group name, as known after the fit; without groups
        that were never measured, and empty if the policy uses no importance.
    num_examples : int
        Examples in the loader.
    forward : ForwardReport or None
        Report on the elastic forward pass; None if it was not asked for.
    full_ratio : float or None
        Median time of the full passes timed between the steps over the cost profile's; None if none was timed.
    based_on : str
        Basis of the choice of the plan: "everything fits", "fixed rule" (a policy without importance),
        "measured importance" (of all groups, in this fit), "remembered importance" (from earlier probes and
        training steps), "size and turns" (no importance known), "everything, in turn" (a fit that trains everything
        for coverage), "everything, to learn its worth" (a first fit that cannot pay for a probe), "everything, as
        choosing takes too long" (too long for a deadline), "the head, as choosing took all of the time" (under a
        deadline that pays for a step of it), or "the server's choice".
    mean_work : float
        Mean work of the steps' batches, in batches of the first one's shape, for which costs are known.
    """

    plan: Plan
    plans: tuple[tuple[int, Plan], ...]
    steps: int
    requested_steps: int
    seconds: float
    selection_seconds: float
    predicted_seconds: float
    step_seconds: float
    full_step_seconds: float
    loss: float
    losses: tuple[float, ...]
    importance: dict[str, float]
    num_examples: int
    forward: ForwardReport | None = None
    full_ratio: float | None = None
    choosing_seconds: float = 0.0
    based_on: str = ""
    preparing_seconds: float = 0.0
    mean_work: float = 1.0

    @property
    def drift(self) -> float:
        """Measured over predicted time of a step: how much slower the device is now than when it was profiled."""
        return self.step_seconds / self.plan.predicted_step_seconds

    @property
    def step_speedup(self) -> float:
        """Time of a full step over the median time of a step.

        The full step is the one timed between the steps, if any was: at the same heat, load and clock rate.
        Otherwise it is the cost profile's, measured or estimated at another time.
        """
        return self._full_seconds / self.step_seconds if self.step_seconds > 0 else 1.0

    @property
    def speedup(self) -> float:
        """Time of the requested steps at full cost over the total time, including that of choosing.

        Steps left out count as no time. The full step is that of `step_speedup`.
        """
        spent = self.seconds + self.selection_seconds
        return self._full_seconds * self.requested_steps * self.mean_work / max(spent, 1e-12)

    def to_metrics(self) -> dict[str, int | float | str]:
        """Return the metrics about training in a client's reply, in plain Python values.

        Raises
        ------
        DivergedError
            If the mean loss is not finite.
        """
        if not math.isfinite(self.loss):
            raise DivergedError(f"the mean loss is {self.loss}")
        return {
            "train-loss": float(self.loss),
            "steps": int(self.steps),
            "requested-steps": int(self.requested_steps),
            "step-seconds": float(self.step_seconds),
            "full-step-seconds": float(self.full_step_seconds),
            "predicted-seconds": float(self.predicted_seconds),
            "trained-groups": int(self.plan.mask.sum()),
            "based-on": self.based_on,
        }

    @property
    def _full_seconds(self) -> float:
        """Time of a full step during this fit, as far as it is known."""
        return self.full_step_seconds * (1.0 if self.full_ratio is None else self.full_ratio)
