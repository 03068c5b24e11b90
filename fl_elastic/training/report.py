"""What one fit did."""

from __future__ import annotations

from dataclasses import dataclass

from fl_elastic.planning import Plan
from fl_elastic.training.elastic_forward import ForwardReport

__all__ = ["FitReport"]


@dataclass(frozen=True)
class FitReport:
    """What one call of `ElasticTrainer.fit` did.

    Attributes
    ----------
    plan : Plan
        The plan in force at the end.
    plans : tuple of (int, Plan)
        Every plan with the step at which it came into force.
    steps, requested_steps : int
        Steps taken, and those that the loader and epochs asked for; fewer if the budget is below the floor.
    seconds : float
        Time of the training steps, by the trainer's clock.
    selection_seconds : float
        Time of probing importance and planning.
    predicted_seconds : float
        Steps and probes by the cost profile: what a virtual clock uses.
    step_seconds : float
        Median time of a step with a whole batch.
    full_step_seconds : float
        Profiled time of a step that trains everything.
    loss : float
        Mean loss over the last epoch's steps.
    losses : tuple of float
        Loss of every step.
    importance : dict
        Score per group name at the last selection; empty if the policy uses none.
    num_examples : int
        Examples in the loader.
    forward : ForwardReport or None
        What the elastic forward pass did; None if it was not asked for.
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

    @property
    def drift(self) -> float:
        """Measured over predicted time of a step: how much slower the device is than when it was measured."""
        return self.step_seconds / self.plan.predicted_step_seconds

    @property
    def step_speedup(self) -> float:
        """Profiled full step over the median step taken."""
        return self.full_step_seconds / self.step_seconds if self.step_seconds > 0 else 1.0

    @property
    def speedup(self) -> float:
        """Time of the requested steps at full cost over the time spent: counts steps left out too."""
        return self.full_step_seconds * self.requested_steps / max(self.seconds, 1e-12)
