"""Means over seeds and their confidence intervals, as numbers and as text for tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student


def interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of the mean, by Student's t; None for a single value.

    >>> round(interval([1.0, 2.0, 3.0]), 2)
    2.48
    """
    if len(values) < 2:
        return None
    quantile = float(student.ppf(0.975, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def mean_text(values: Sequence[float], *, sign: bool = False) -> str:
    """Return the mean of shares in percent, with its 95 % interval if there are several values.

    >>> mean_text([0.5, 0.52]), mean_text([-0.012], sign=True)
    ('51.0 ± 12.7', '-1.2')
    """
    half = interval(values)
    around = "" if half is None else f" ± {100 * half:.1f}"
    return f"{100 * statistics.fmean(values):{'+' if sign else ''}.1f}{around}"
