"""The time of a stream, which may be told by a clock that somebody sets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["StreamClock"]


@dataclass(frozen=True)
class StreamClock:
    """How much time has passed in a stream, whatever its clock says.

    A step back, or one ahead that is longer than any pause of the stream, is a clock that was set: no time has
    passed. So a trigger that waits for time neither waits for ever nor fires again and again.

    Parameters
    ----------
    passed : float
        Seconds since the stream began.
    last : float or None
        What the clock said last; None before the first time.
    longest : float
        Longest pause that is believed, in seconds.

    Examples
    --------
    >>> clock = StreamClock().at(100.0).at(107.0)
    >>> clock.passed, clock.at(50.0).passed, clock.at(50.0).at(53.0).passed, clock.at(1e12).passed
    (7.0, 7.0, 10.0, 7.0)
    """

    passed: float = 0.0
    last: float | None = None
    longest: float = 86400.0

    def at(self, t: float) -> StreamClock:
        """Return the clock once it says ``t``; a time that is no number is passed over."""
        if not math.isfinite(t):
            return self
        step = 0.0 if self.last is None else t - self.last
        return replace(
            self, last=t, passed=self.passed + (step if 0 <= step <= self.longest else 0)
        )
