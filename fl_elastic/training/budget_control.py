"""Hold the budget while training: time the steps, compare them with the allowed time, correct the plan."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

from fl_elastic.planning import Plan

# Number of steps whose median is the present step time; smaller number for the first comparison with an estimated
# profile.
_WINDOW, _FIRST_LOOK = 20, 3
# Relative error of a step time below which no new plan is made.
_TOLERANCE = 0.02
# A new plan is made only if it saves this many times the time of making it.
_WORTH_A_PLAN = 4.0
# Full steps are timed between the last this many of the plan's steps up to each step at which they are due.
_SAMPLES = 5
# Share of the training time that timed full steps may take: with a measured profile, and with an estimated one.
_REFERENCE_SHARE, _ESTIMATED_SHARE = 0.02, 0.125
# Under a deadline a step counts as this quantile of the step times.
_SLOW_QUANTILE = 0.9
# Under a speed-up the first step is taken if the budget pays for this share of it, because a speed-up holds on
# average.
_PAYS_FOR_ONE = 0.5


class BudgetControl:
    """Compares the steps of one fit with its budget: how many more may be taken, and whether to plan again.

    A deadline is in seconds. A speed-up is relative to a full step, whose time drifts with the device's temperature
    and load; therefore full steps are timed now and then during the fit.

    Parameters
    ----------
    allowed_seconds : float
        Time for all steps of the fit, derived from the cost profile's full step; may be infinite.
    requested_steps : int
        Steps that share this time.
    correct : bool
        Whether measured times may change the plan; if not, only predicted times count.
    relative : bool
        Whether the budget is a speed-up.
    estimated : bool
        Whether the profile is an estimate; then the first steps are compared sooner.
    full_seconds : float
        Time of a full step.
    open_ended : bool
        Whether the data may hold more than `requested_steps`; then only the time ends the fit.
    times_full_steps : bool
        Whether full steps may be timed: whether one stays within the memory budget.

    Attributes
    ----------
    planning_seconds : float
        Time that making a plan takes. A new plan is made only if it saves several times as much.
    full_ratio : float or None
        Median of the timed full steps over the cost profile's full step; None if none was timed.
    """

    def __init__(
        self,
        allowed_seconds: float,
        requested_steps: int,
        *,
        correct: bool,
        relative: bool = False,
        estimated: bool = False,
        full_seconds: float = 0.0,
        times_full_steps: bool = True,
        open_ended: bool = False,
    ) -> None:
        self.requested_steps = requested_steps
        self.correct = correct
        self.correction = 1.0
        self.corrected = False
        self.drift = 1.0
        self.full_ratio: float | None = None
        self.spent = 0.0
        self.predicted = 0.0
        self.steps = 0
        self._allowed_seconds = allowed_seconds
        self._limited = not math.isinf(allowed_seconds)
        self._relative = relative
        self._references: list[float] = []
        self._reference_seconds = 0.0
        self._replans = 0
        self._patient_until = 0
        self._next_reference = _WINDOW
        self._early = self._estimated = estimated
        self._reference_share = _ESTIMATED_SHARE if estimated else _REFERENCE_SHARE
        self._full_seconds = full_seconds
        self.planning_seconds = 0.0
        self._times_full_steps = times_full_steps
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        # Times on batches of any shape: under a deadline the next batch may take as long.
        self._of_any_shape: deque[float] = deque(maxlen=_WINDOW)
        self._unevenness = 1.0
        self._granted = 0
        self._open_ended = open_ended
        self._work = 0.0

    @property
    def mean_work(self) -> float:
        """Mean work of the batches so far, in batches of the shape for which costs are known.

        The work of a batch of another shape, such as of padded texts, is estimated from its time.
        """
        return self._work / self.steps if self.steps else 1.0

    def allowed_seconds(self, plan: Plan) -> float:
        """Return the seconds that all steps of the fit may take, at the device's present speed, less sending."""
        return self._allowed_seconds * self.drift * self._share_of_work - plan.sending_seconds

    def record(
        self,
        seconds: float,
        *,
        whole_batch: bool,
        steady_seconds: float | None = None,
        predicted_seconds: float = 0.0,
        nearly_full: bool = False,
    ) -> None:
        """Count a step; steps with a smaller batch do not enter the median step time.

        Parameters
        ----------
        seconds : float
            Time of the step.
        whole_batch : bool
            Whether its batch had the full size.
        steady_seconds : float, optional
            Average time of such a step, if this one did more or less work than usual.
        predicted_seconds : float
            The plan's prediction.
        nearly_full : bool
            Whether the step trained almost everything, so that its time can stand in for a full step's.
        """
        self.spent += seconds
        self.predicted += predicted_seconds
        self.steps += 1
        steady = seconds if steady_seconds is None else steady_seconds
        usual = 0.0
        if self.correct and not whole_batch:
            usual = self._measured() or predicted_seconds * self.drift * self.correction
        self._work += steady / usual if usual > 0 else 1.0
        self._of_any_shape.append(steady)
        if whole_batch:
            self._recent.append(steady)
        if whole_batch and nearly_full and self._compares_with_full_steps:
            self._note_reference(seconds / predicted_seconds)
            # Such steps replace the timed full steps.
            self._next_reference = max(self._next_reference, self.steps + _WINDOW)

    def reference_due(self) -> bool:
        """Return whether a full step should be timed now: a few are, up to the 20th, 40th, 80th step and so on.

        Full steps are timed one at a time, between steps of the plan, because consecutive full steps would find
        their data in the cache. Together they may take at most a fiftieth of the training time. With an estimated
        profile the first one is timed after two steps regardless of that limit, and two more once all of them take
        at most an eighth of the time; an eighth is then the limit for later ones too.
        """
        if not (self._times_full_steps and self._compares_with_full_steps):
            return False
        if self._early and not self._references:
            return self.steps >= _FIRST_LOOK - 1
        after = self._reference_seconds + self._full_seconds
        cheap = after <= self._reference_share * self.spent
        # A single disturbed measurement would determine the drift for as long as the profile is an estimate.
        few = self._estimated and len(self._references) < _FIRST_LOOK
        return cheap and (few or self.steps > self._next_reference - _SAMPLES)

    def reference(self, ratio: float, seconds: float = 0.0) -> None:
        """Record a timed full step: its time over the cost profile's, and its seconds."""
        self._note_reference(ratio)
        self._reference_seconds += seconds
        if self.steps >= self._next_reference:
            self._next_reference = 2 * self.steps

    def _note_reference(self, ratio: float) -> None:
        # A clock too coarse to see the step gives no information: assume no drift.
        self._references.append(ratio if ratio > 0 else 1.0)
        # Of two, take the faster: disturbances only make a step longer.
        self.full_ratio = self.drift = statistics.median_low(self._references)

    @property
    def _compares_with_full_steps(self) -> bool:
        return self.correct and self._relative and self._limited

    @property
    def _share_of_work(self) -> float:
        """`mean_work` for a speed-up, which relates to full steps on the same batches; 1 under a deadline."""
        return self.mean_work if self._compares_with_full_steps else 1.0

    def replanned(self, planning_seconds: float | None = None) -> None:
        """Forget the step times of the previous plan; the next correction waits longer after each correction.

        Parameters
        ----------
        planning_seconds : float, optional
            Time that making the plan took; by default the previous one's.
        """
        if planning_seconds is not None:
            self.planning_seconds = planning_seconds
        if self.corrected:
            self._replans += 1
            self._early = False
            self._patient_until = self.steps + _WINDOW * 2 ** max(self._replans - 2, 0)
        self.corrected = False
        if self._recent:
            self._unevenness = self._slow_step_seconds() / max(self.recent_step_seconds, 1e-12)
        self._recent.clear()
        self._of_any_shape.clear()

    def steps_left(self, plan: Plan) -> int:
        """Return how many more steps of the plan the budget pays for; may be 0."""
        left = self.requested_steps - self.steps
        if not self._limited:
            return left
        if self._granted:
            return max(self._granted - self.steps, 0)
        if self.correct:
            step = self._measured() or plan.predicted_step_seconds * self.drift
            left_seconds = self.allowed_seconds(plan) - self.spent
            if self._relative:
                # Half a step of grace: the budget is met on average instead of always undershot.
                affordable = math.floor(left_seconds / (step * self._share_of_work) + 0.5)
            else:
                # A deadline is not overrun: the last step must fit even if it is a slow one.
                fits = left_seconds >= self._slow(plan) * (1 - 1e-9)
                affordable = math.floor(left_seconds / step + 1e-9) if fits else 0
        elif self._relative:
            affordable = math.floor(self.requested_steps * plan.step_fraction + 1e-9) - self.steps
        else:
            unspent = self.allowed_seconds(plan) - self.predicted
            affordable = math.floor(unspent / plan.predicted_step_seconds + 1e-9)
        if self._relative and self.steps == 0:
            # A speed-up holds on average, so a short fit takes its only step even if choosing used up its time.
            paid = self._allowed_seconds >= _PAYS_FOR_ONE * plan.predicted_step_seconds
            affordable = max(affordable, int(paid))
        return max(affordable if self._open_ended else min(left, affordable), 0)

    def grant_a_step(self) -> None:
        """Allow, once, one more step than the remaining time pays for."""
        self._granted = self.steps + 1

    def left_seconds(self, plan: Plan) -> float:
        """Return the time left for all steps; may be infinite."""
        return self.allowed_seconds(plan) - (self.spent if self.correct else self.predicted)

    def missed_pace(self, plan: Plan) -> float | None:
        """Return the ratio of measured to predicted step time if it calls for a new plan; None otherwise.

        A new plan has to bring the step time nearer to the allowed one by more than a tolerance, and to save
        several times the time of making it.
        """
        measured = self._measured()
        if not self.correct or measured is None or not self._limited:
            return None
        if self.steps < self._patient_until:
            return None
        if not plan.feasible:
            # Such a plan takes longer steps deliberately, and fewer of them.
            return None
        allowed = self.allowed_seconds(plan) / self.requested_steps / self._share_of_work
        wanted = measured / (plan.predicted_step_seconds * self.drift)
        missed = abs(measured - allowed) * (self.requested_steps - self.steps)
        misses = (
            abs(measured / allowed - 1) > _TOLERANCE
            and missed > _WORTH_A_PLAN * self.planning_seconds
            and abs(wanted / self.correction - 1) > _TOLERANCE
        )
        return wanted if misses else None

    def correct_pace(self, pace: float) -> None:
        """Make plans with this ratio of measured to predicted time from now on."""
        self.correction, self.corrected = pace, True

    def _slow(self, plan: Plan) -> float:
        """Return the 90th percentile of the step times; before a plan's first step, scaled from the plan before."""
        if self._of_any_shape:
            return self._slow_step_seconds()
        return plan.predicted_step_seconds * self.drift * self.correction * self._unevenness

    def _slow_step_seconds(self) -> float:
        # A smaller last batch must not make the next whole one look quicker.
        return max(_slow_of(self._recent), _slow_of(self._of_any_shape))

    def _measured(self) -> float | None:
        needed = _FIRST_LOOK if self._early else _WINDOW
        return statistics.median(self._recent) if len(self._recent) >= needed else None

    @property
    def recent_step_seconds(self) -> float:
        """Median of the last steps of the present plan, 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0


def _slow_of(times: Collection[float]) -> float:
    """Return the 90th percentile of some times; 0 if there are none."""
    ordered = sorted(times)
    return ordered[math.ceil(_SLOW_QUANTILE * len(ordered)) - 1] if ordered else 0.0
