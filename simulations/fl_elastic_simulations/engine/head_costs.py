"""What a head in closed form takes a client besides inference: measured once, beside the cost profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_elastic.readout.choice import Sample, choose_places
from fl_elastic.readout.place import Place
from fl_elastic.training.head_sums import held_out
from fl_elastic.update.closed_form import best_ridge
from fl_elastic.update.folds import Fold
from fl_elastic.update.head_sums import HeadSums
from fl_elastic.update.ridge import RidgeSystem
from fl_elastic.update.trusted_sums import harmful

__all__ = ["HeadCosts", "measure_head_costs"]

_ROWS, _REPEATS, _FOLDS = 256, 3, 5
# A fleet, and places such as those of MobileNetV2.
_CLIENTS, _CLASSES, _RANKED, _PLACES, _WIDE = 8, 40, 640, 33, 1000


@dataclass(frozen=True)
class HeadCosts:
    """CPU seconds of one thread of the host for one multiplication, which a device takes its slowdown times.

    Attributes
    ----------
    product : float
        Of adding the products of examples' features: ``features**2`` for each example.
    row : float
        Of finding the rows as which a fold travels: ``examples**2 * features``.
    solving : float
        Of the server, for a head from the sums of eight clients: ``features**3``.
    ranking : float
        Of the server, for choosing among places, for each of their features.

    Examples
    --------
    >>> costs = HeadCosts(product=1e-3, row=1e-2)
    >>> costs.adding(2, 10), costs.writing(10, 4), costs.writing(320, 4) == costs.writing(999, 4)
    (0.2, 0.8, True)
    """

    product: float = 0.0
    row: float = 0.0
    solving: float = 0.0
    ranking: float = 0.0

    def adding(self, examples: int, features: int) -> float:
        """Return the seconds of adding the products of so many examples."""
        return self.product * examples * features**2

    def on_server(self, features: int, ranked: int) -> float:
        """Return the seconds of a server that solves for a head of so many features, and has ranked so many."""
        return self.solving * features**3 + self.ranking * ranked

    def writing(self, examples: int, features: int) -> float:
        """Return the seconds of finding the rows of five folds; sums over more examples travel as they are."""
        return self.row * min(examples, held_out(features)) ** 2 / _FOLDS * features


def measure_head_costs(features: int) -> HeadCosts:
    """Measure them for a head of so many features on this host, by the time of all threads of its products."""
    examples = held_out(features) // _FOLDS
    solving, ranking = _server_seconds(features)
    rows = np.random.default_rng(0).normal(size=(_ROWS, features + 1))
    rows[:, -1] = 1.0
    fold = Fold.of(rows[:examples, :-1], rows[:examples, :1])
    adding = _median_seconds(lambda: rows.T @ rows)
    writing = _median_seconds(fold.centred)
    return HeadCosts(
        product=adding / (_ROWS * (features + 1) ** 2),
        row=writing / (fold.num_examples**2 * features),
        solving=solving / features**3,
        ranking=ranking,
    )


def _server_seconds(features: int) -> tuple[float, float]:
    """Return what a head from eight clients takes, and what ranking places takes for each of their features."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(_CLIENTS, _FOLDS, max(features // 16, 8), features))
    classes = rng.integers(0, _CLASSES, size=rows.shape[:3])
    sums = [
        HeadSums.of_folds(
            "weight",
            [Fold.of(fold, np.eye(_CLASSES)[labels]) for fold, labels in zip(*own, strict=True)],
            features,
            _CLASSES,
            True,
        )
        for own in zip(rows, classes, strict=True)
    ]
    started = time.process_time()
    harmful(best_ridge(RidgeSystem.of(sums, intercept=True))[0])
    solving = time.process_time() - started
    places = {
        Place(f"block{number}", "flat"): rng.normal(size=(_RANKED, _WIDE)).astype(np.float32)
        for number in range(_PLACES)
    }
    sample = Sample.of(
        places, np.eye(_CLASSES)[rng.integers(0, _CLASSES, _RANKED)], np.arange(_RANKED)
    )
    started = time.process_time()
    choose_places(sample, most_features=2 * _WIDE)
    return solving, (time.process_time() - started) / (_PLACES * _WIDE)


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of some calls after a first one."""
    taken = []
    for _ in range(_REPEATS + 1):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken[1:])
