"""What a head in closed form takes a client besides inference: measured once, beside the cost profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_elastic.training.head_sums import held_out
from fl_elastic.update.folds import Fold

__all__ = ["HeadCosts", "measure_head_costs"]

_ROWS, _REPEATS, _FOLDS = 256, 3, 5


@dataclass(frozen=True)
class HeadCosts:
    """CPU seconds of one thread of the host for one multiplication, which a device takes its slowdown times.

    Attributes
    ----------
    product : float
        Of adding the products of examples' features: ``features**2`` for each example.
    row : float
        Of finding the rows as which a fold travels: ``examples**2 * features``.

    Examples
    --------
    >>> costs = HeadCosts(product=1e-3, row=1e-2)
    >>> costs.adding(2, 10), costs.writing(10, 4), costs.writing(320, 4) == costs.writing(999, 4)
    (0.2, 0.8, True)
    """

    product: float = 0.0
    row: float = 0.0

    def adding(self, examples: int, features: int) -> float:
        """Return the seconds of adding the products of so many examples."""
        return self.product * examples * features**2

    def writing(self, examples: int, features: int) -> float:
        """Return the seconds of finding the rows of five folds; sums over more examples travel as they are."""
        return self.row * min(examples, held_out(features)) ** 2 / _FOLDS * features


def measure_head_costs(features: int) -> HeadCosts:
    """Measure them for a head of so many features on this host, by the time of one thread."""
    examples = held_out(features) // _FOLDS
    rows = np.random.default_rng(0).normal(size=(_ROWS, features + 1))
    rows[:, -1] = 1.0
    fold = Fold.of(rows[:examples, :-1], rows[:examples, :1])
    adding = _median_seconds(lambda: rows.T @ rows)
    writing = _median_seconds(fold.centred)
    return HeadCosts(
        product=adding / (_ROWS * (features + 1) ** 2),
        row=writing / (fold.num_examples**2 * features),
    )


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of some calls after a first one."""
    taken = []
    for _ in range(_REPEATS + 1):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return statistics.median(taken[1:])
