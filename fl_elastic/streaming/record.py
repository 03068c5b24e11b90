"""History of a stream: accuracy and memory along it, and where drifts were detected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["NO_LABEL", "Point", "StreamRecord", "label_name"]

NO_LABEL = "none"
"""Stands in summaries for samples without a label."""


@dataclass(frozen=True)
class Point:
    """What was so at one moment of a stream.

    Parameters
    ----------
    labelled : int
        Labelled samples until then.
    accuracy : float
        Share of right predictions since the point before.
    samples : int
        How many predictions that are.
    store_bytes : int
        Of the store's file.
    stored : mapping of str to int
        Samples in the store by label; "none" for those without.
    """

    labelled: int
    accuracy: float
    samples: int
    store_bytes: int
    stored: Mapping[str, int]


@dataclass
class StreamRecord:
    """Points at equal distances along a stream of any length, never more than ``most``.

    When there are too many, each two become one, and the distance doubles.

    Parameters
    ----------
    most : int
        Points that are kept.
    every : int
        Labelled samples from one point to the next.
    points : list of Point
        So far.
    drifts : list of int
        Labelled samples before each of the newest ``most`` drifts.
    right, samples : int
        Since the last point.

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
        """Keep a point."""
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
        # What came after the last of them belongs to the next.
        self.right, self.samples = self.right + round(hits), self.samples + int(samples)


def label_name(label: int | None) -> str:
    """Return what a summary calls a label."""
    return NO_LABEL if label is None else str(label)
