"""Count and time the steps of one fit."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping

from torch import nn

from fl_elastic.groups import Batch, batch_shape
from fl_elastic.planning import Plan
from fl_elastic.profiling import Clock

__all__ = ["StepLog"]


class StepLog:
    """What the steps of one fit cost and touched.

    Parameters
    ----------
    whole_batch : tuple of int
        Shape of a batch that enters step times; a smaller last batch would distort them.
    clock : callable
        Gives seconds.
    """

    def __init__(self, whole_batch: tuple[int, ...], clock: Clock) -> None:
        self.clock = clock
        self.losses: list[float] = []
        self.tensor_steps: Counter[str] = Counter()
        self.seconds = 0.0
        self.selection_seconds = 0.0
        self.predicted_seconds = 0.0
        self.choosing_seconds = 0.0
        self._whole_batch = whole_batch
        self._whole_seconds: list[float] = []

    def step(
        self,
        batch: Batch,
        plan: Plan,
        tensors: Mapping[str, nn.Parameter],
        take: Callable[[Batch], float],
    ) -> tuple[float, bool]:
        """Take one step; return its seconds and whether its batch was whole.

        It counts for those of the tensors that it gave a gradient.
        """
        started = self.clock()
        self.losses.append(take(batch))
        seconds = self.clock() - started
        whole = batch_shape(batch) == self._whole_batch
        if whole:
            self._whole_seconds.append(seconds)
        self.seconds += seconds
        self.predicted_seconds += plan.predicted_step_seconds
        self.tensor_steps.update(
            name for name, parameter in tensors.items() if parameter.grad is not None
        )
        return seconds, whole

    def charge(self, seconds: float) -> None:
        """Count predicted seconds of choosing: of a probe or a plan."""
        self.predicted_seconds += seconds
        self.choosing_seconds += seconds

    @property
    def median_step_seconds(self) -> float:
        """Median seconds of a step with a whole batch, 0 if there was none."""
        return statistics.median(self._whole_seconds) if self._whole_seconds else 0.0
