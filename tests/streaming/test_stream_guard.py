"""What is held out, and what counts as worse."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fl_elastic.errors import StreamError
from fl_elastic.streaming.guard import Guard, RecentSamples, Row, Score


def row(number: int) -> Row:
    return Row(np.full(2, number, np.float32), number % 3, number)


def test_every_so_many_are_held_out_and_leave_in_order() -> None:
    recent, guard = RecentSamples(), Guard(every=3, size=2)
    held, left = [], []
    for number in range(1, 16):
        if recent.count_labelled(guard):
            held.append(number)
            left += [each.number for each in recent.hold(row(number), guard)]
    assert held == [3, 6, 9, 12, 15] and left == [3, 6, 9]
    assert [each.number for each in recent.held_out] == [12, 15]
    assert len(recent.release()) == 2 and recent.held_out == []


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        # The standard error of 90 % of 32 samples is 5 points and a bit.
        (Score(0.5, 0.90, 32), Score(0.5, 0.75, 32), True),
        (Score(0.5, 0.90, 32), Score(0.5, 0.82, 32), False),
        (Score(0.5, 0.90, 3200), Score(0.5, 0.84, 3200), True),
        (Score(0.5, 0.90, 3200), Score(0.5, 0.86, 3200), False),
        # One sample of ten is no sign of anything.
        (Score(0.5, 1.00, 10), Score(0.5, 0.90, 10), False),
        (Score(0.5, 1.00, 10), Score(0.5, 0.70, 10), True),
        (Score(0.5, 0.90, 32), Score(0.9, 0.95, 32), False),
        (Score(0.5, 0.90, 32), Score(1.1, 0.90, 32), True),
        (Score(0.5, 0.90, 32), Score(1.1, 0.94, 32), False),
        (Score(0.5, 0.90, 32), Score(math.nan, 0.95, 32), True),
        (Score(0.5, 1.0, 4), Score(9.0, 0.0, 4), False),
        (Score(0.5, 1.0, 4), Score(math.inf, 0.0, 4), True),
        (Score(0.0, 0.0, 0), Score(0.0, 0.0, 0), False),
    ],
)
def test_worse(before: Score, after: Score, worse: bool) -> None:
    assert bool(Guard().worse(before, after)) is worse


def test_what_means_nothing_is_refused() -> None:
    for settings in ({"every": 1}, {"size": 0}):
        with pytest.raises(StreamError):
            Guard(**settings)  # type: ignore[arg-type]
