"""What sending an update takes of a deadline, and the largest update that is worth its time."""

from __future__ import annotations

import math
from dataclasses import replace

from fl_elastic.budget import Budget

_MOST_OF_DEADLINE = 0.5


def sendable(budget: Budget) -> Budget:
    """Return the budget with an uplink limit that takes at most half of the deadline.

    An update that takes longer leaves too few steps to be worth sending.
    """
    most = most_to_send(budget)
    if most is None:
        return budget
    return replace(budget, uplink=most if budget.uplink is None else min(budget.uplink, most))


def most_to_send(budget: Budget) -> float | None:
    """Return the bytes that can be sent in half of the deadline; None for no limit."""
    if budget.deadline is None or budget.bandwidth is None:
        return None
    return _MOST_OF_DEADLINE * budget.deadline * budget.bandwidth


def too_much_to_send(budget: Budget, sent_bytes: float, who: str = "it") -> str:
    """Return why an update is too large for a budget from `sendable`, in terms of the limit that the user gave.

    The budget's deadline is the rest of the user's deadline after choosing, so the message says how much more is
    needed.

    >>> too_much_to_send(Budget(uplink=100.0), 250.0)
    'it sends 250 bytes, the uplink budget is 100: raise it to 250'
    """
    most, sent = most_to_send(budget), math.ceil(sent_bytes)
    assert budget.uplink is not None
    if most is None or budget.uplink < most:
        limit = f"{budget.uplink:.0f}"
        return f"{who} sends {sent} bytes, the uplink budget is {limit}: raise it to {sent}"
    assert budget.deadline is not None
    seconds = budget.sending_seconds(sent_bytes)
    # `Budget.after` leaves next to nothing of a deadline that is used up: say 0.
    left = budget.deadline if budget.deadline > 1e-6 * seconds else 0.0
    more = _rounded_up(seconds / _MOST_OF_DEADLINE - left)
    late = (
        f"sending its {sent} bytes takes {seconds:.3g} s, more than half of the {left:.3g} s that are left of the "
        f"deadline: allow at least {more:.3g} s more or use a smaller codec"
    )
    return late if who == "it" else f"{who}: {late}"


def _rounded_up(seconds: float) -> float:
    """Return the seconds rounded up to three digits, so that the suggested value suffices: 120.04 gives 121.

    >>> _rounded_up(120.04), _rounded_up(120.0)
    (121.0, 120.0)
    """
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return math.ceil(seconds / unit * (1 - 1e-9)) * unit
