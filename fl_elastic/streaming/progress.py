"""Where a learner stands: what it has counted, and what triggers and reports ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from fl_elastic.streaming.triggers import Moment

__all__ = ["Progress", "StreamClock"]

_MOST_REASONS = 50


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


@dataclass
class Progress:
    """Counters of a learner; all that is in it survives a restart.

    Attributes
    ----------
    observed, labelled, right : int
        Samples that made sense, those whose label has come, and those of them that were predicted.
    hits, weight : float
        The same two for the prequential accuracy: older samples count ever less.
    rejected : dict of str to int
        Samples that made no sense, by reason.
    drifts, adaptations, rolled_back, saves_failed : int
        How often.
    since : int
        Labelled samples since the last adaptation.
    since_drift : int or None
        Labelled samples since a drift that nothing was done about yet.
    clock : StreamClock
        Of the stream.
    adapted_at : float
        What had passed of its time at the last adaptation, in seconds.
    """

    observed: int = 0
    labelled: int = 0
    right: int = 0
    hits: float = 0.0
    weight: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)
    drifts: int = 0
    adaptations: int = 0
    rolled_back: int = 0
    saves_failed: int = 0
    since: int = 0
    since_drift: int | None = None
    clock: StreamClock = field(default_factory=StreamClock)
    adapted_at: float = 0.0

    def refused(self, why: str) -> None:
        """Count a sample that made no sense."""
        known = why in self.rejected or len(self.rejected) < _MOST_REASONS
        reason = why if known else "other"
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    @property
    def accuracy(self) -> float:
        """Prequential accuracy; NaN before the first label."""
        return self.hits / self.weight if self.weight else float("nan")

    def scored(self, correct: bool, drift: bool, fading: float) -> None:
        """Count a prediction whose label is known now."""
        self.labelled += 1
        self.right += correct
        self.hits, self.weight = correct + fading * self.hits, 1.0 + fading * self.weight
        self.since += 1
        if self.since_drift is not None:
            self.since_drift += 1
        if drift:
            self.drifts += 1
            self.since_drift = 0

    def adapted(self, kept: bool) -> None:
        """Count an adaptation."""
        self.adaptations += 1
        self.rolled_back += not kept
        self.since, self.since_drift = 0, None
        self.adapted_at = self.clock.passed

    def moment(self, idle: float = 0.0) -> Moment:
        """Return what triggers look at."""
        return Moment(
            self.since, self.clock.passed + idle - self.adapted_at, self.since_drift, idle
        )
