"""Outcome of a message to a device: answered, away, or out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fl_elastic_simulations.unequal.availability import Availability
from fl_elastic_simulations.unequal.clock import RoundCost


def fits_memory(needed_bytes: float, memory_bytes: float | None) -> bool:
    """Return whether a device has enough memory; None is no limit.

    >>> fits_memory(2e9, 1e9), fits_memory(2e9, None)
    (False, True)
    """
    return memory_bytes is None or needed_bytes <= memory_bytes


class Outcome(StrEnum):
    """Outcome of a message to a device."""

    ANSWERED = "answered"
    LATE = "late"
    AWAY = "away"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"


@dataclass(frozen=True)
class Answer:
    """When the server hears of a device to which it has sent a message, and the outcome.

    Parameters
    ----------
    arrival : float
        Simulated time at which it hears.
    outcome : Outcome
        Whether a reply arrives, or what the server learns instead. The receiver decides by `in_time` what is late.
    """

    arrival: float
    outcome: Outcome


def answer(
    sent: float,
    cost: RoundCost,
    availability: Availability,
    *,
    free: float = 0.0,
    peak_bytes: float = 0.0,
    memory_bytes: float | None = None,
) -> Answer:
    """Return when and how a device answers a message.

    The device first completes earlier messages, then receives, computes and sends. If it goes away meanwhile, it
    does not continue later, and the server learns this when it goes. If the message needs more memory than there
    is, the server learns this when the device has received it.

    Parameters
    ----------
    sent : float
        Simulated time at which the message is sent.
    cost : RoundCost
        Cost of the message on the device.
    availability : Availability
        When the device can be reached.
    free : float
        Simulated time from which on the device is idle.
    peak_bytes : float
        Memory that the message needs.
    memory_bytes : float, optional
        Memory of the device.

    Examples
    --------
    >>> cost, mornings = RoundCost(2.0, 1.0, 0.5), Availability(((0.0, 10.0),))
    >>> answer(1.0, cost, mornings)
    Answer(arrival=4.5, outcome=<Outcome.ANSWERED: 'answered'>)
    >>> answer(7.0, cost, mornings).outcome, answer(1.0, cost, mornings, free=8.0).arrival
    (<Outcome.AWAY: 'away'>, 10.0)
    """
    goes = availability.leaves(sent)
    has_it = max(sent, free) + cost.downlink_seconds
    done = max(sent, free) + cost.total
    fits = fits_memory(peak_bytes, memory_bytes)
    if goes <= sent or (done if fits else has_it) > goes:
        return Answer(goes, Outcome.AWAY)
    return Answer(done, Outcome.ANSWERED) if fits else Answer(has_it, Outcome.OUT_OF_MEMORY)
