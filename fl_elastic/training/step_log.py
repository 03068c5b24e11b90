"""What the steps of one fit cost and touched."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from torch import nn

from fl_elastic.groups import Batch
from fl_elastic.groups.forward import batch_shape
from fl_elastic.planning import Plan
from fl_elastic.profiling.clock import Clock

__all__ = ["StepLog"]


class StepLog:
    """What the steps of one fit cost and touched.

    Parameters
    ----------
    whole_batch : tuple of int
        Shape of a batch that enters step times; a smaller last batch would distort them.
    clock : callable
        Gives seconds.

    Attributes
    ----------
    began, ended : float
        When the fit began, and when its last step was taken.
    """

    def __init__(self, whole_batch: tuple[int, ...], clock: Clock) -> None:
        self.clock = clock
        self.began = self.ended = clock()
        self.losses: list[float] = []
        self.tensor_steps: Counter[str] = Counter()
        self.seconds = 0.0
        self.selection_seconds = 0.0
        self.predicted_seconds = 0.0
        self.choosing_seconds = 0.0
        self._stepped = 0.0
        self._whole_batch = whole_batch
        self._whole_seconds: list[float] = []

    def step(
        self,
        batch: Batch,
        plan: Plan,
        tensors: Mapping[str, nn.Parameter],
        take: Callable[[Batch], float],
        in_part: Callable[[], Collection[int]] = tuple,
        ended: Callable[[], bool] = lambda: True,
    ) -> tuple[float, bool]:
        """Take one step; return its seconds and whether its batch was whole.

        If it ``ended``, and does not wait for more batches, it counts for those of the tensors that it gave a
        gradient, or whose ids ``in_part`` returns afterwards: a part of these had one.
        """
        started = self.clock()
        self.losses.append(take(batch))
        self._stepped = self.clock()
        seconds = self._stepped - started
        whole = batch_shape(batch) == self._whole_batch
        if whole:
            self._whole_seconds.append(seconds)
        self.seconds += seconds
        self.predicted_seconds += plan.predicted_step_seconds
        if ended():
            self._count(tensors, in_part())
        return seconds, whole

    def finish(self, tensors: Mapping[str, nn.Parameter], take: Callable[[], bool]) -> float:
        """Take what a step still owes to batches that were counted; return its seconds."""
        started = self.clock()
        if take():
            self._count(tensors)
        self._stepped = self.clock()
        self.seconds += self._stepped - started
        return self._stepped - started

    def _count(self, tensors: Mapping[str, nn.Parameter], parts: Collection[int] = ()) -> None:
        self.tensor_steps.update(
            name for name, each in tensors.items() if each.grad is not None or id(each) in parts
        )

    def after_step(self) -> float:
        """Count what the loop took since the step's end, and return it."""
        seconds = self.clock() - self._stepped
        self.seconds += seconds
        return seconds

    def charge(self, seconds: float) -> None:
        """Count predicted seconds of choosing: of a probe or a plan."""
        self.predicted_seconds += seconds
        self.choosing_seconds += seconds

    @property
    def median_step_seconds(self) -> float:
        """Median seconds of a step with a whole batch, 0 if there was none."""
        return statistics.median(self._whole_seconds) if self._whole_seconds else 0.0
