"""Accuracy curves: the mean over the seeds, with their smallest and largest value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fl_elastic_simulations.report.summary import Point

__all__ = ["Curve", "mean_curve"]


@dataclass(frozen=True)
class Curve:
    """One value per round in each tuple; ``seconds`` or ``uplink_bytes`` may be empty.

    ``lowest`` and ``highest`` are those of any single seed.
    """

    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    seconds: tuple[float, ...]
    uplink_bytes: tuple[float, ...]
    seeds: int


def mean_curve(history: Sequence[Point]) -> Curve:
    """Average a history over its seeds, round by round.

    Only the rounds that every seed has evaluated count: where a seed is missing, the mean of the
    others would jump, in accuracy and on the time axis.

    >>> first = [Point(0, 1, 0.4, 10.0, 5.0), Point(0, 2, 0.9, 20.0, 9.0)]
    >>> curve = mean_curve([*first, Point(1, 1, 0.6, 14.0, 5.0)])
    >>> curve.rounds, curve.accuracy, curve.lowest, curve.highest, curve.seconds
    ((1,), (0.5,), (0.4,), (0.6,), (12.0,))
    """
    by_seed: dict[int, dict[int, Point]] = {}
    for point in history:
        by_seed.setdefault(point.seed, {})[point.round] = point
    shared = sorted(
        set.intersection(*(set(points) for points in by_seed.values())) if by_seed else ()
    )
    columns = [[points[index] for points in by_seed.values()] for index in shared]
    accuracies = [[point.accuracy for point in column] for column in columns]
    return Curve(
        rounds=tuple(shared),
        accuracy=tuple(fmean(values) for values in accuracies),
        lowest=tuple(min(values) for values in accuracies),
        highest=tuple(max(values) for values in accuracies),
        seconds=_means([[point.seconds for point in column] for column in columns]),
        uplink_bytes=_means([[point.uplink_bytes for point in column] for column in columns]),
        seeds=len(by_seed),
    )


def _means(columns: Sequence[Sequence[float | None]]) -> tuple[float, ...]:
    """Return the mean of each column, or nothing at all if one value is unknown."""
    means = []
    for column in columns:
        known = [value for value in column if value is not None]
        if len(known) < len(column):
            return ()
        means.append(fmean(known))
    return tuple(means)
