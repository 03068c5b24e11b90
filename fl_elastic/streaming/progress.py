"""Progress of a learner: its counters, and their values along the stream."""

from __future__ import annotations

from collections.abc import Mapping
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
        Weighted numbers of correct predictions and of labelled samples, for the prequential accuracy; weights fade.
    rejected : dict of str to int
        Number of refused samples and labels, by reason.
    drifts, adaptations, rolled_back, saves_failed : int
        Number of drifts, adaptations, undone adaptations and failed saves.
    since : int
        Number of samples learned since the last adaptation.
    since_drift : int or None
        Number of samples learned since a drift, if no adaptation has followed it yet; else None.
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
        """Count a learned sample whose label came so late that its prediction is no longer known."""
        self.since += 1
        if self.since_drift is not None:
            self.since_drift += 1

    def adapted(self, kept: bool) -> None:
        """Count an adaptation."""
        self.adaptations += 1
        self.rolled_back += not kept
        self.since, self.since_drift = 0, None


NO_LABEL = "none"
"""Name in summaries for samples without a label."""


@dataclass(frozen=True)
class Point:
    """Measurements at one moment of a stream.

    Parameters
    ----------
    labelled : int
        Number of labelled samples so far.
    accuracy : float
        Share of correct predictions since the previous point.
    samples : int
        Number of these predictions.
    store_bytes : int
        Bytes of the store.
    stored : mapping of str to int
        Number of samples in the store by label; "none" for those without.
    """

    labelled: int
    accuracy: float
    samples: int
    store_bytes: int
    stored: Mapping[str, int]


@dataclass
class StreamRecord:
    """Points at equal distances along a stream of any length, never more than ``most``.

    When there are too many points, pairs of neighbours are merged, and the distance doubles.

    Parameters
    ----------
    most : int
        Most points that are kept.
    every : int
        Number of labelled samples between two points.
    points : list of Point
        Points so far.
    drifts : list of int
        Number of labelled samples at each of the newest ``most`` drifts.
    right, samples : int
        Correct and all predictions since the last point.

    Examples
    --------
    >>> record = StreamRecord(most=2, every=1)
    >>> for labelled in range(1, 5):
    ...     if record.scored(correct=labelled > 2, drift=labelled == 3, labelled=labelled):
    ...         record.mark(labelled, 100, {0: labelled})
    >>> [(point.labelled, point.accuracy) for point in record.points], record.every, record.drifts
    ([(2, 0.0), (4, 1.0)], 2, [3])
    """

    most: int = 256
    every: int = 25
    points: list[Point] = field(default_factory=list)
    drifts: list[int] = field(default_factory=list)
    right: int = 0
    samples: int = 0

    def scored(self, correct: bool, drift: bool, labelled: int) -> bool:
        """Count a prediction whose label is known; return whether it is time to `mark` a point."""
        self.right += correct
        self.samples += 1
        if drift:
            self.drifts = [*self.drifts, labelled][-self.most :]
        return labelled % self.every == 0

    def mark(self, labelled: int, store_bytes: int, stored: Mapping[int | None, int]) -> None:
        """Add a point."""
        by_label = {label_name(label): count for label, count in stored.items() if count}
        accuracy = self.right / max(self.samples, 1)
        self.points.append(Point(labelled, accuracy, self.samples, store_bytes, by_label))
        self.right = self.samples = 0
        if len(self.points) > self.most:
            self.every *= 2
            self._halve()

    def _halve(self) -> None:
        kept: list[Point] = []
        hits = samples = 0.0
        for point in self.points:
            hits, samples = hits + point.accuracy * point.samples, samples + point.samples
            if point.labelled % self.every == 0:
                kept.append(
                    Point(point.labelled, hits / max(samples, 1), int(samples), point.store_bytes, point.stored)
                )  # fmt: skip
                hits = samples = 0.0
        self.points = kept
        # Predictions after the last point belong to the next one.
        self.right, self.samples = self.right + round(hits), self.samples + int(samples)


def label_name(label: int | None) -> str:
    """Return the name of a label in a summary."""
    return NO_LABEL if label is None else str(label)
