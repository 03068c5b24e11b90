"""What becomes of messages to devices, found by walking through the seconds."""

from __future__ import annotations

from fl_elastic_simulations.unequal.availability import Availability
from fl_elastic_simulations.unequal.clock import RoundCost
from fl_elastic_simulations.unequal.outcome import Answer, Outcome


def walked(
    sent: int, cost: RoundCost, there: Availability, free: int, needed: float, memory: float | None
) -> Answer:
    """The same second by second: the device waits its turn, receives, computes, sends, while it is there."""
    now, left = sent, [("receive", int(cost.downlink_seconds))]
    left.append(("work", int(cost.compute_seconds + cost.uplink_seconds)))
    while True:
        if now == sent and not there.there(now):
            return Answer(float(now), Outcome.AWAY)
        if now >= free:
            while left and left[0][1] == 0:
                done, _ = left.pop(0)
                if done == "receive" and memory is not None and needed > memory:
                    return Answer(float(now), Outcome.OUT_OF_MEMORY)
            if not left:
                return Answer(float(now), Outcome.ANSWERED)
        if not there.there(now):
            return Answer(float(now), Outcome.AWAY)
        if now >= free:
            left[0] = left[0][0], left[0][1] - 1
        now += 1
