"""The newest samples that a learner holds in memory; they are part of its saved state."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from fl_elastic.streaming.guard import Guard, Row

# Newest labelled samples that are kept for the next adaptation beside the store, and predictions that wait for
# their label.
_NEW, _WAITING = 512, 10_000


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
        """Empty the window after a drift, since its samples are out of date; return them."""
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
        """Correct the label of a sample that is trained on next, or held out."""
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
