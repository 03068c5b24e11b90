"""From the cells of a federation task to its table: means, intervals, time and bytes to a target accuracy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fl_elastic_simulations.benchmarks.federation_methods import REFERENCE

__all__ = ["DECIMALS", "Curve", "cells_of", "interval", "reached", "sooner_than", "summarise_task"]

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

DECIMALS = 4
"""Of the numbers of a curve that are no bytes."""

Curve = Sequence[Sequence[float]]
"""Of each test simulated seconds, bytes up and down until then, and accuracy."""


def summarise_task(
    rows: Mapping[str, Mapping[str, Any]], task: str, methods: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return a row per method over the seeds for which it and the reference were run.

    The target of each seed is the reference's final accuracy. Time and bytes to it are those of the first test that
    reaches it, the reference's own over the method's; a method that never gets there has none. Tests come at the
    same times for all, so a method is not helped or delayed by how long its rounds are.

    Parameters
    ----------
    rows : mapping
        Cells by name.
    task : str
        Name of the task.
    methods : sequence of str
        In the order of the table.
    """
    cells = cells_of(rows, task)
    reference = cells.get(REFERENCE, {})
    return {
        method: _summary(cells[method], reference)
        for method in methods
        if method in cells and set(cells[method]) & set(reference)
    }


def cells_of(
    rows: Mapping[str, Mapping[str, Any]], task: str
) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Return the cells of a task by method and seed."""
    cells: dict[str, dict[int, Mapping[str, Any]]] = {}
    for name, row in rows.items():
        of_task, _, rest = name.partition(" | ")
        method, _, seed = rest.rpartition(" | ")
        if of_task == task and seed.isdigit():
            cells.setdefault(method, {})[int(seed)] = row
    return cells


def sooner_than(
    cells: Mapping[int, Mapping[str, Any]], reference: Mapping[int, Mapping[str, Any]]
) -> tuple[int, int, float, float] | None:
    """Return seeds, how many reach the reference's final accuracy, how much sooner, with how much fewer bytes.

    Bytes are those of both directions; ratios are means over the seeds that reach it, 0 if none does. None where
    there is no seed of both.

    >>> slow = {"final_accuracy": 0.5, "curve": [[4.0, 8, 8, 0.4], [8.0, 16, 16, 0.5]]}
    >>> fast = {"final_accuracy": 0.6, "curve": [[2.0, 2, 2, 0.5], [4.0, 8, 8, 0.6]]}
    >>> sooner_than({0: fast}, {0: slow, 1: slow})
    (1, 1, 4.0, 8.0)
    """
    seeds = sorted(set(cells) & set(reference))
    if not seeds:
        return None
    found = [each for seed in seeds if (each := _ratios(cells[seed], reference[seed])) is not None]
    times, _, both = zip(*found, strict=True) if found else ((0.0,), (), (0.0,))
    return len(seeds), len(found), statistics.fmean(times), statistics.fmean(both)


def _summary(
    cells: Mapping[int, Mapping[str, Any]], reference: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    seeds = sorted(set(cells) & set(reference))
    finals = [cells[seed]["final_accuracy"] for seed in seeds]
    against = [cells[s]["final_accuracy"] - reference[s]["final_accuracy"] for s in seeds]
    ratios = [_ratios(cells[seed], reference[seed]) for seed in seeds]
    found = [each for each in ratios if each is not None]
    means: list[float | None] = [statistics.fmean(each) for each in zip(*found, strict=True)]
    time, uplink, both = means or [None] * 3
    devices = cells[seeds[0]]["coverage"]
    clients = sum(cells[seed]["client_seconds"] for seed in seeds)
    return {
        "seeds": len(seeds),
        "accuracy": statistics.fmean(finals),
        "interval": interval(finals),
        "against_reference": statistics.fmean(against),
        "against_interval": interval(against),
        "reached": len(found),
        "time_ratio": time,
        "uplink_ratio": uplink,
        "bytes_ratio": both,
        "choosing_share": sum(cells[seed]["choosing_seconds"] for seed in seeds) / clients,
        "profile_share": sum(cells[seed]["profile_seconds"] for seed in seeds) / clients,
        **{
            name: statistics.fmean(cells[seed][name] for seed in seeds)
            for name in (
                "rounds", "simulated_seconds", "uplink_bytes", "downlink_bytes", "rejected",
                "choosing_seconds", "profile_seconds", "client_seconds", "cpu_seconds",
            )
        },
        "least_coverage": {
            device: min(
                cells[seed]["coverage"].get(device, {"least": 0.0})["least"] for seed in seeds
            )
            for device in devices
        },
    }  # fmt: skip


def _ratios(
    cell: Mapping[str, Any], reference: Mapping[str, Any]
) -> tuple[float, float, float] | None:
    """Return the reference's time, uplink and bytes both ways to its own accuracy over the method's.

    None if the method never gets there.
    """
    # As exact as points of a curve are: else waiting might not reach what it ends at.
    target = round(reference["final_accuracy"], DECIMALS)
    ours, theirs = reached(cell["curve"], target), reached(reference["curve"], target)
    if ours is None or theirs is None or min(ours[:2]) <= 0:
        return None
    return theirs[0] / ours[0], theirs[1] / ours[1], sum(theirs[1:]) / sum(ours[1:])


def reached(curve: Curve, target: float) -> tuple[float, float, float] | None:
    """Return simulated seconds, bytes up and bytes down at the first test whose accuracy is at least ``target``.

    Tests of the model before any round are left out.

    >>> reached([[0.0, 0, 0, 0.1], [1.0, 5, 8, 0.3], [2.0, 9, 16, 0.5]], 0.4)
    (2.0, 9, 16)
    """
    for seconds, up, down, accuracy in curve:
        if accuracy >= target and down > 0:
            return seconds, up, down
    return None


def interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of the mean, by Student's t; None for a single value.

    >>> round(interval([1.0, 2.0, 3.0]), 2)
    2.48
    """
    if len(values) < 2:
        return None
    return _quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile: of few degrees of freedom from the table, of others by expansion.

    Terms up to the third power of one over the degrees (Abramowitz and Stegun, 26.7.5): less than 2e-4 off from ten
    degrees on.
    """
    if freedom in _STUDENT:
        return _STUDENT[freedom]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
