"""The newest samples that a learner holds in memory; they are part of its saved state."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from fl_elastic.streaming.guard import Guard, HeldOut, Row

# Newest labelled samples that are kept for the next adaptation beside the store, and predictions that wait for
# their label.
_NEW, _WAITING = 512, 10_000


@dataclass(frozen=True, eq=False)
class RecentSamples:
    """State of `Recent`.

    Parameters
    ----------
    new, held_out : tuple of Row
        Samples to train on, and the held-out window, oldest first.
    counted : int
        Number of labelled samples counted by the window.
    waiting : dict of int to int or None
        Prediction for each sample whose label has not arrived.
    """

    new: tuple[Row, ...] = ()
    held_out: tuple[Row, ...] = ()
    counted: int = 0
    waiting: dict[int, int | None] = field(default_factory=dict)


class Recent:
    """New samples to train on, held-out samples, and predictions whose label has not arrived.

    Parameters
    ----------
    guard : Guard
        Decides which samples are held out.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.new: deque[Row] = deque(maxlen=_NEW)
        self.held_out = HeldOut(guard)
        self._waiting: dict[int, int | None] = {}

    def wait(self, sample_id: int, prediction: int | None) -> None:
        """Keep a prediction until its label arrives."""
        self._waiting[sample_id] = prediction
        while len(self._waiting) > _WAITING:
            del self._waiting[next(iter(self._waiting))]

    def is_waited_for(self, sample_id: int) -> bool:
        """Return whether the label of a sample has not arrived yet."""
        return sample_id in self._waiting

    @property
    def waiting(self) -> frozenset[int]:
        """The samples whose label has not arrived yet."""
        return frozenset(self._waiting)

    def answered(self, sample_id: int) -> int | None:
        """Return and remove the prediction for a sample whose label has arrived."""
        return self._waiting.pop(sample_id)

    def holds_out(self, sample_id: int) -> bool:
        """Return whether a sample is in the held-out window."""
        return any(row.number == sample_id for row in self.held_out.rows)

    def relabel(self, sample_id: int, y: int) -> None:
        """Correct the label of a sample that is trained on next, or held out."""
        for rows in (self.new, self.held_out.rows):
            for place, row in enumerate(rows):
                if row.number == sample_id:
                    rows[place] = replace(row, y=y)

    def forget_samples(self) -> None:
        """Drop all samples: they are features of a frozen part that no longer exists."""
        self.new.clear()
        self.held_out.clear()

    def forget(self, numbers: Collection[int]) -> None:
        """Drop these samples and their predictions."""
        kept = [row for row in self.new if row.number not in numbers]
        self.new.clear()
        self.new.extend(kept)
        self.held_out.rows = [row for row in self.held_out.rows if row.number not in numbers]
        for number in numbers:
            self._waiting.pop(number, None)

    def to_state(self) -> RecentSamples:
        """Return the state to save."""
        held = self.held_out
        return RecentSamples(tuple(self.new), tuple(held.rows), held.counted, dict(self._waiting))

    def restore(self, state: RecentSamples) -> None:
        """Restore the result of `to_state`."""
        self.new.extend(state.new)
        self.held_out = HeldOut(self._guard, state.held_out, state.counted)
        for sample_id, said in state.waiting.items():
            self.wait(sample_id, said)
