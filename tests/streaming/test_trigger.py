"""When to adapt: after so many samples, and after a drift."""

from __future__ import annotations

from typing import Any

import pytest

from fl_elastic.errors import StreamError
from fl_elastic.streaming import Trigger


@pytest.mark.parametrize(
    ("trigger", "samples", "since_drift", "due"),
    [
        (Trigger(5), 5, None, True),
        (Trigger(5), 4, None, False),
        (Trigger(5, after_drift=3), 4, 3, True),
        (Trigger(5, after_drift=3), 4, 2, False),
        (Trigger(5, after_drift=None), 4, 99, False),
        (Trigger(None, after_drift=0), 99, None, False),
        (Trigger(None, after_drift=0), 0, 0, True),
        (Trigger(None, None), 10**9, 10**9, False),
    ],
)
def test_it_is_due_or_not(
    trigger: Trigger, samples: int, since_drift: int | None, due: bool
) -> None:
    assert trigger.due(samples, since_drift) is due


@pytest.mark.parametrize("given", [(0,), (1, -1), (float("nan"),), (1.5,), ("5",), (1, 0.5)])
def test_what_means_nothing_is_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(StreamError, match="is invalid"):
        Trigger(*given)
