"""Progress of a learner: its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST_REASONS = 50


@dataclass
class Progress:
    """Counters of a learner; they all survive a restart.

    Attributes
    ----------
    observed, labelled, right : int
        Numbers of valid samples, of those with a label and a known prediction, and of those that were predicted
        correctly.
    unlearned : int
        Number of labelled samples that the store no longer held when their label came: their prediction counts,
        but nothing was learned from them.
    hits, weight : float
        Correct predictions and labelled samples for the prequential accuracy; older samples have ever less weight.
    rejected : dict of str to int
        Number of refused samples and labels, by reason.
    drifts, adaptations, rolled_back, saves_failed : int
        Number of drifts, adaptations, undone adaptations and failed saves.
    since : int
        Number of learned samples since the last adaptation.
    since_drift : int or None
        The same number since a drift that no adaptation has followed yet; None without one.
    """

    observed: int = 0
    labelled: int = 0
    right: int = 0
    unlearned: int = 0
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
        """Count a refused sample or label."""
        known = why in self.rejected or len(self.rejected) < _MOST_REASONS
        reason = why if known else "other"
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    @property
    def accuracy(self) -> float:
        """Prequential accuracy; NaN before the first label."""
        return self.hits / self.weight if self.weight else float("nan")

    def scored(self, correct: bool, drift: bool, fading: float, *, learned: bool) -> None:
        """Count a prediction whose label is now known; ``learned`` tells whether its sample can be learned from."""
        self.labelled += 1
        self.unlearned += not learned
        self.right += correct
        self.hits, self.weight = correct + fading * self.hits, 1.0 + fading * self.weight
        self.since += learned
        if self.since_drift is not None:
            self.since_drift += learned
        if drift:
            self.drifts += 1
            self.since_drift = 0

    def unscored(self) -> None:
        """Count a learned sample whose label came so late that the prediction for it is not known any more."""
        self.since += 1
        if self.since_drift is not None:
            self.since_drift += 1

    def adapted(self, kept: bool) -> None:
        """Count an adaptation."""
        self.adaptations += 1
        self.rolled_back += not kept
        self.since, self.since_drift = 0, None
