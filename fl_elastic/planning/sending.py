"""One deadline for training and for sending what was trained."""

from __future__ import annotations

import math
from dataclasses import replace

from fl_elastic.budget import Budget
from fl_elastic.profiling import CostProfile

__all__ = [
    "most_to_send",
    "sendable",
    "sending_seconds_per_byte",
    "too_much_to_send",
    "with_sending",
]

_MOST_OF_DEADLINE = 0.5


def sending_seconds_per_byte(budget: Budget, steps: int) -> float:
    """Return what each byte of the update takes out of the time of each of ``steps`` local steps.

    >>> sending_seconds_per_byte(Budget(deadline=10.0, bandwidth=1e6), steps=5)
    2e-07
    """
    return budget.sending_seconds(1.0) / max(steps, 1)


def with_sending(profile: CostProfile, seconds_per_byte: float) -> CostProfile:
    """Return the costs with the sending of each group as part of what training it costs.

    Spread over the round's steps, sending is one more linear cost of a group, so the same knapsack weighs a second
    of sending against a second of computing.
    """
    if seconds_per_byte == 0:
        return profile
    sending = seconds_per_byte * profile.parameter_bytes
    return replace(profile, optimizer_seconds=profile.optimizer_seconds + sending)


def sendable(budget: Budget) -> Budget:
    """Return the budget with an uplink that takes at most half of the deadline.

    An update that takes longer leaves too few steps for it to be worth sending.
    """
    most = most_to_send(budget)
    if most is None:
        return budget
    return replace(budget, uplink=most if budget.uplink is None else min(budget.uplink, most))


def most_to_send(budget: Budget) -> float | None:
    """Return the bytes that may be sent in half of the deadline; None where that is no limit."""
    if budget.deadline is None or budget.bandwidth is None:
        return None
    return _MOST_OF_DEADLINE * budget.deadline * budget.bandwidth


def too_much_to_send(budget: Budget, sent_bytes: float, who: str = "it") -> str:
    """Return why an update of that size is too large for a budget from `sendable`, by the limit that was given.

    >>> too_much_to_send(Budget(uplink=100.0), 250.0)
    'it sends 250 bytes, the uplink budget is 100: raise it to 250'
    """
    most, sent = most_to_send(budget), math.ceil(sent_bytes)
    assert budget.uplink is not None
    if most is None or budget.uplink < most:
        limit = f"{budget.uplink:.0f}"
        return f"{who} sends {sent} bytes, the uplink budget is {limit}: raise it to {sent}"
    seconds = budget.sending_seconds(sent_bytes)
    late = (
        f"sending its {sent} bytes takes {seconds:.3g} s, more than half of the deadline of "
        f"{budget.deadline:.3g} s: allow at least {_rounded_up(seconds / _MOST_OF_DEADLINE):.3g} s or use a "
        "smaller codec"
    )
    return late if who == "it" else f"{who}: {late}"


def _rounded_up(seconds: float) -> float:
    """Return the next number of three digits, so that what is said does: 120.04 s are 121 s.

    >>> _rounded_up(120.04), _rounded_up(120.0)
    (121.0, 120.0)
    """
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return math.ceil(seconds / unit * (1 - 1e-9)) * unit
