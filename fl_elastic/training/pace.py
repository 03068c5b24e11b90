"""Hold the budget while training: compare measured with allowed time and correct the plan."""

from __future__ import annotations

import math
import statistics
from collections import deque

from fl_elastic.planning import Plan

__all__ = ["Pace"]

_WINDOW = 20
_TOLERANCE = 0.02


class Pace:
    """Watches the steps of one fit.

    Parameters
    ----------
    allowed_seconds : float
        For all steps of the fit; may be infinite.
    requested_steps : int
        Steps that share it.
    correct : bool
        Whether measured times may change the plan; off, only the prediction counts.
    """

    def __init__(self, allowed_seconds: float, requested_steps: int, *, correct: bool) -> None:
        self.allowed_seconds = allowed_seconds
        self.requested_steps = requested_steps
        self.correct = correct
        self.correction = 1.0
        self.corrected = False
        self.spent = 0.0
        self.steps = 0
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def record(self, seconds: float, *, whole_batch: bool) -> None:
        """Count a step; steps with a smaller batch do not enter the estimate."""
        self.spent += seconds
        self.steps += 1
        if whole_batch:
            self._recent.append(seconds)

    def replanned(self) -> None:
        """Forget the step times of the plan before."""
        self.corrected = False
        self._recent.clear()

    def steps_left(self, plan: Plan) -> int:
        """Return how many more steps the plan may take; at least one step is always taken."""
        left = self.requested_steps - self.steps
        if math.isinf(self.allowed_seconds):
            return left
        if self.correct:
            step = self._measured() or plan.predicted_step_seconds
            affordable = (self.allowed_seconds - self.spent) / step
            # Half a step of grace: the budget is met on average instead of always undershot.
            affordable = math.floor(affordable + 0.5)
        else:
            affordable = math.floor(self.requested_steps * plan.step_fraction + 1e-9) - self.steps
        return max(min(left, affordable), 1 if self.steps == 0 else 0)

    def wants_replan(self, plan: Plan) -> bool:
        """Whether the measured pace misses the budget by more than the tolerance; updates the correction."""
        measured = self._measured()
        left = self.requested_steps - self.steps
        if not self.correct or measured is None or left < 1 or math.isinf(self.allowed_seconds):
            return False
        if not plan.feasible:
            # Its steps are longer than their share by choice; taking fewer of them holds the budget.
            return False
        needed = (self.allowed_seconds - self.spent) / left
        if needed <= 0 or abs(measured / needed - 1) <= _TOLERANCE:
            return False
        average = self.allowed_seconds / self.requested_steps
        ratio = measured / plan.predicted_step_seconds
        wanted = ratio * min(max(average / needed, 0.5), 2.0)
        self.corrected = abs(wanted / self.correction - 1) > _TOLERANCE
        self.correction = wanted
        return self.corrected

    def _measured(self) -> float | None:
        return statistics.median(self._recent) if len(self._recent) == _WINDOW else None
