"""From the cells of a federation task to its table: means, intervals, time and bytes to a target accuracy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fl_elastic.bench.federation_methods import REFERENCE

__all__ = ["interval", "reached", "smoothed", "summarise_task"]

_WINDOW = 3
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_STUDENT = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}

Curve = Sequence[Sequence[float]]


def summarise_task(
    rows: Mapping[str, Mapping[str, Any]], task: str, methods: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return a row per method over the seeds for which it and the reference were run.

    The target of each seed is the reference's final accuracy, the mean of its last five tests. Time and uplink
    to it are those of the first of three tests whose mean reaches it, the reference's own over the method's; a
    method that never gets there has none.

    Parameters
    ----------
    rows : mapping
        Cells by name.
    task : str
        Name of the task.
    methods : sequence of str
        In the order of the table.
    """
    cells: dict[str, dict[int, Mapping[str, Any]]] = {}
    for name, row in rows.items():
        of_task, _, rest = name.partition(" | ")
        method, _, seed = rest.rpartition(" | ")
        if of_task == task and seed.isdigit():
            cells.setdefault(method, {})[int(seed)] = row
    reference = cells.get(REFERENCE, {})
    return {
        method: _summary(cells[method], reference)
        for method in methods
        if method in cells and set(cells[method]) & set(reference)
    }


def _summary(
    cells: Mapping[int, Mapping[str, Any]], reference: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    seeds = sorted(set(cells) & set(reference))
    finals = [cells[seed]["final_accuracy"] for seed in seeds]
    against = [cells[s]["final_accuracy"] - reference[s]["final_accuracy"] for s in seeds]
    ratios = [_ratios(cells[seed], reference[seed]) for seed in seeds]
    found = [each for each in ratios if each is not None]
    devices = cells[seeds[0]]["coverage"]
    return {
        "seeds": len(seeds),
        "accuracy": statistics.fmean(finals),
        "interval": interval(finals),
        "against_reference": statistics.fmean(against),
        "against_interval": interval(against),
        "reached": len(found),
        "time_ratio": statistics.fmean(time for time, _ in found) if found else None,
        "uplink_ratio": statistics.fmean(sent for _, sent in found) if found else None,
        "rounds": statistics.fmean(cells[seed]["rounds"] for seed in seeds),
        "simulated_seconds": statistics.fmean(cells[s]["simulated_seconds"] for s in seeds),
        "uplink_bytes": statistics.fmean(cells[seed]["uplink_bytes"] for seed in seeds),
        "rejected": sum(cells[seed]["rejected"] for seed in seeds),
        "cpu_seconds": statistics.fmean(cells[seed]["cpu_seconds"] for seed in seeds),
        "least_coverage": {
            device: min(
                cells[seed]["coverage"].get(device, {"least": 0.0})["least"] for seed in seeds
            )
            for device in devices
        },
    }


def _ratios(cell: Mapping[str, Any], reference: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the reference's time and uplink to its own accuracy over the method's; None if it never gets there."""
    target = reference["final_accuracy"]
    ours, theirs = reached(cell["curve"], target), reached(reference["curve"], target)
    if ours is None or theirs is None or ours[0] <= 0 or ours[1] <= 0:
        return None
    return theirs[0] / ours[0], theirs[1] / ours[1]


def reached(curve: Curve, target: float) -> tuple[float, float] | None:
    """Return simulated seconds and uplink bytes at the first test whose smoothed accuracy is at least ``target``.

    >>> reached([[0.0, 0, 0.1], [1.0, 5, 0.3], [2.0, 9, 0.5], [3.0, 12, 0.5]], 0.3)
    (2.0, 9)
    """
    for row, accuracy in zip(curve, smoothed([row[2] for row in curve]), strict=True):
        if accuracy >= target:
            return row[0], row[1]
    return None


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and the two before it.

    >>> smoothed([1.0, 2.0, 3.0, 4.0])
    [1.0, 1.5, 2.0, 3.0]
    """
    return [
        statistics.fmean(values[max(end - _WINDOW, 0) : end]) for end in range(1, len(values) + 1)
    ]


def interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of the mean, by Student's t; None for a single value.

    >>> round(interval([1.0, 2.0, 3.0]), 2)
    2.48
    """
    if len(values) < 2:
        return None
    quantile = _STUDENT.get(len(values) - 1, 1.96)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
