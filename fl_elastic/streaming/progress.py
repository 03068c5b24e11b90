"""Where a learner stands: what it has counted."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Progress"]

_MOST_REASONS = 50


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
