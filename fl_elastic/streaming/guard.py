"""The newest samples, and the guard that compares models before and after an adaptation on held-out samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from numpy.typing import NDArray

from fl_elastic.errors import StreamError

# Newest labelled samples that are kept for the next adaptation beside the store, and predictions that wait for
# their label.
_NEW, _WAITING = 512, 10_000


@dataclass(frozen=True, eq=False)
class Row:
    """A sample as the store keeps it.

    Parameters
    ----------
    x : array
        Input or features.
    y : int or None
        Label; None if it has not arrived.
    number : int
        Number of the sample in the stream, its id everywhere; 0 if unknown.
    """

    x: NDArray[Any]
    y: int | None
    number: int = 0


@dataclass(frozen=True)
class Score:
    """Mean loss, share of right answers, and number of held-out samples."""

    loss: float
    accuracy: float
    samples: int


@dataclass(frozen=True)
class Guard:
    """Settings of the guard: which samples are held out, and when the model counts as worse.

    Parameters
    ----------
    every : int
        One in this many labelled samples goes to the held-out window, and to training only after leaving it.
    size : int
        Number of samples in the window.
    """

    every: int = 10
    size: int = 32

    least: ClassVar[int] = 8
    """Samples that a comparison needs; with fewer, only a loss that is not finite counts as worse."""
    tolerance: ClassVar[float] = 0.05
    """Accepted fall of the accuracy, on top of one standard error at this number of samples."""
    loss_tolerance: ClassVar[float] = 0.5
    """Accepted rise of the loss if the accuracy has not risen."""

    def __post_init__(self) -> None:
        if self.every < 2 or self.size < 1:
            raise StreamError(
                f"a guard needs every of at least 2 and size of at least 1, got {self.every} and {self.size}"
            )

    def worse(self, before: Score, after: Score) -> str:
        """Return why the model is worse than before; empty if it is not.

        Examples
        --------
        >>> Guard().worse(Score(0.5, 0.9, 32), Score(0.6, 0.7, 32))
        'accuracy on held-out samples fell from 0.900 to 0.700'
        """
        if after.samples and not math.isfinite(after.loss):
            return f"loss on held-out samples became {after.loss}"
        if min(before.samples, after.samples) < self.least:
            return ""
        if before.accuracy - after.accuracy > self.tolerance + _chance(before, after):
            return f"accuracy on held-out samples fell from {before.accuracy:.3f} to {after.accuracy:.3f}"
        rise = after.loss - before.loss
        if after.accuracy <= before.accuracy and rise > self.loss_tolerance:
            return f"loss on held-out samples rose from {before.loss:.3f} to {after.loss:.3f}"
        return ""


def _chance(before: Score, after: Score) -> float:
    """Return the standard error of an accuracy on this number of samples; at least the share of one sample."""
    share = (before.accuracy + after.accuracy) / 2
    samples = min(before.samples, after.samples)
    return max(math.sqrt(share * (1 - share) / samples), 1 / samples) + 1e-9


@dataclass(eq=False)
class RecentSamples:
    """New samples to train on, held-out samples, and predictions whose label has not arrived.

    Parameters
    ----------
    new : deque of Row
        Samples to train on, oldest first.
    held_out : list of Row
        The held-out window: the newest held-out samples, one in ``Guard.every`` labelled ones, oldest first.
    counted : int
        Number of labelled samples counted by the window.
    waiting : dict of int to int or None
        Prediction for each sample whose label has not arrived.

    Examples
    --------
    >>> import numpy as np
    >>> recent, guard = RecentSamples(), Guard(every=2, size=1)
    >>> rows = [Row(np.zeros(1), y) for y in range(4)]
    >>> [recent.count_labelled(guard) for _ in rows], [row.y for row in recent.hold(rows[1], guard)]
    ([False, True, False, True], [])
    >>> [row.y for row in recent.hold(rows[3], guard)], [row.y for row in recent.held_out]
    ([1], [3])
    """

    new: deque[Row] = field(default_factory=deque)
    held_out: list[Row] = field(default_factory=list)
    counted: int = 0
    waiting: dict[int, int | None] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Add a sample to train on."""
        self.new.append(row)
        while len(self.new) > _NEW:
            self.new.popleft()

    def count_labelled(self, guard: Guard) -> bool:
        """Count a labelled sample; return whether it is to be held out."""
        self.counted += 1
        return self.counted % guard.every == 0

    def hold(self, row: Row, guard: Guard) -> list[Row]:
        """Add a sample to the window; return the samples that leave it, which may be trained on."""
        self.held_out.append(row)
        surplus = max(len(self.held_out) - guard.size, 0)
        leaving, self.held_out = self.held_out[:surplus], self.held_out[surplus:]
        return leaving

    def release(self) -> list[Row]:
        """Empty the window, as after a drift, because its samples are out of date; return these samples."""
        leaving, self.held_out = self.held_out, []
        return leaving

    def wait(self, sample_id: int, prediction: int | None) -> None:
        """Keep a prediction until its label arrives."""
        self.waiting[sample_id] = prediction
        while len(self.waiting) > _WAITING:
            del self.waiting[next(iter(self.waiting))]

    def holds_out(self, sample_id: int) -> bool:
        """Return whether a sample is in the held-out window."""
        return any(row.number == sample_id for row in self.held_out)

    def relabel(self, sample_id: int, y: int) -> None:
        """Correct the label of a sample that will be trained on, or is held out."""
        for rows in (self.new, self.held_out):
            for place, row in enumerate(rows):
                if row.number == sample_id:
                    rows[place] = replace(row, y=y)

    def forget_samples(self) -> None:
        """Drop all samples: they are features of a frozen part that no longer exists."""
        self.new.clear()
        self.held_out.clear()

    def forget(self, numbers: Collection[int]) -> None:
        """Drop these samples and their predictions."""
        self.new = deque(row for row in self.new if row.number not in numbers)
        self.held_out = [row for row in self.held_out if row.number not in numbers]
        for number in numbers:
            self.waiting.pop(number, None)
