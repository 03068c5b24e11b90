"""What a head in closed form takes a client besides inference: measured once, beside the cost profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_elastic.update.head_sums import few_rows

__all__ = ["HeadCosts", "measure_head_costs"]

_ROWS, _REPEATS = 256, 3


@dataclass(frozen=True)
class HeadCosts:
    """CPU seconds of one thread of the host for one multiplication, which a device takes its slowdown times.

    Attributes
    ----------
    product : float
        Of adding the products of examples' features: ``features**2`` for each example.
    row : float
        Of finding the few rows as which sums over few examples travel: ``examples**2 * features / 2``.

    Examples
    --------
    >>> costs = HeadCosts(product=1e-3, row=1e-2)
    >>> costs.adding(2, 10), costs.writing(4, 10), costs.writing(6, 10)
    (0.2, 0.8, 0.0)
    """

    product: float = 0.0
    row: float = 0.0

    def adding(self, examples: int, features: int) -> float:
        """Return the seconds of adding the products of so many examples."""
        return self.product * examples * features**2

    def writing(self, examples: int, features: int) -> float:
        """Return the seconds of finding the rows; sums over more examples travel as they are."""
        return 0.0 if 2 * examples > features else self.row * examples**2 * features / 2


def measure_head_costs(features: int) -> HeadCosts:
    """Measure them for a head of so many features on this host, by the time of one thread."""
    examples = max(min(_ROWS, features // 2), 1)
    rows = np.random.default_rng(0).normal(size=(_ROWS, features + 1))
    rows[:, -1] = 1.0
    few = rows[:examples].T @ rows[:examples]
    adding = _median_seconds(lambda: rows.T @ rows)
    writing = _median_seconds(lambda: few_rows(few, examples))
    return HeadCosts(
        product=adding / (_ROWS * (features + 1) ** 2),
        row=writing / (examples**2 * (features + 1) / 2),
    )


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of some calls after a first one."""
    taken = []
    for _ in range(_REPEATS + 1):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return statistics.median(taken[1:])
