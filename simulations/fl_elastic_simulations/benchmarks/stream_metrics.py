"""How well a model learns from a stream: while it goes on, over tasks, and around drifts.

A table of accuracies has a row per moment, after each task of the stream, and a column per task, in the order in
which they come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import StreamError

__all__ = [
    "anytime_accuracy",
    "average_accuracy",
    "backward_transfer",
    "drift_delays",
    "false_alarms",
    "forgetting",
    "forward_transfer",
    "prequential_accuracy",
    "recovery",
]


def prequential_accuracy(correct: ArrayLike, fading: float = 0.99) -> NDArray[np.float64]:
    """Return the accuracy after each sample of a stream, older ones counting ever less.

    Parameters
    ----------
    correct : array-like of bool, shape (N,)
        Whether the model was right on each sample before it was trained on it.
    fading : float
        What a sample counts when the next one comes, in (0, 1]; 1 gives the mean so far.

    Notes
    -----
    Gama, Sebastião and Rodrigues, Machine Learning 2013: both the sum of hits and the number of samples fade.

    Examples
    --------
    >>> prequential_accuracy([1, 0, 1], fading=0.5).round(3).tolist()
    [1.0, 0.333, 0.714]
    """
    if not 0 < fading <= 1:
        raise StreamError(f"fading {fading} must be above 0 and at most 1")
    hits = weight = 0.0
    accuracy = []
    for right in np.asarray(correct, float).tolist():
        hits, weight = right + fading * hits, 1.0 + fading * weight
        accuracy.append(hits / weight)
    return np.array(accuracy, np.float64)


def average_accuracy(table: ArrayLike) -> float:
    """Return the mean accuracy over all tasks at the end."""
    return float(_square(table)[-1].mean())


def anytime_accuracy(table: ArrayLike) -> float:
    """Return the mean, over all moments, of the mean accuracy over the tasks seen until then."""
    accuracies = _square(table)
    return float(np.mean([row[: seen + 1].mean() for seen, row in enumerate(accuracies)]))


def forgetting(table: ArrayLike) -> float:
    """Return how far each task but the last has fallen from its best, on average (Chaudhry et al., ECCV 2018).

    The best is sought at all moments but the last.
    """
    accuracies = _square(table, least=2)
    return float((accuracies[:-1, :-1].max(0) - accuracies[-1, :-1]).mean())


def backward_transfer(table: ArrayLike) -> float:
    """Return how much each task but the last has gained since it was trained, on average (GEM, NIPS 2017)."""
    accuracies = _square(table, least=2)
    return float((accuracies[-1, :-1] - np.diag(accuracies)[:-1]).mean())


def forward_transfer(table: ArrayLike, untrained: ArrayLike) -> float:
    """Return how much better than an untrained model each task but the first is just before it is trained.

    Parameters
    ----------
    table : array-like, shape (T, T)
        Accuracies.
    untrained : array-like, shape (T,)
        Accuracy of the untrained model on each task.

    Notes
    -----
    As GEM defines it (Lopez-Paz and Ranzato, NIPS 2017).
    """
    accuracies, baseline = _square(table, least=2), np.asarray(untrained, float)
    if baseline.shape != accuracies.shape[:1]:
        raise StreamError(f"{baseline.shape} untrained accuracies for {len(accuracies)} tasks")
    return float((np.diag(accuracies, 1) - baseline[1:]).mean())


def drift_delays(alarms: Sequence[int], drifts: Sequence[int], within: int) -> list[float]:
    """Return how many samples after each drift the first alarm came; NaN if none did.

    Parameters
    ----------
    alarms, drifts : sequence of int
        Positions in the stream; that of a drift is its first changed sample.
    within : int
        An alarm later than so many samples, or after the next drift, is none of this one.

    Examples
    --------
    >>> drift_delays([20, 130, 140], drifts=[100, 300], within=100)
    [30.0, nan]
    """
    ends = [*drifts, math.inf][1:]
    delays = []
    for start, end in zip(drifts, ends, strict=True):
        own = [alarm - start for alarm in alarms if start <= alarm < min(end, start + within + 1)]
        delays.append(float(min(own, default=math.nan)))
    return delays


def false_alarms(alarms: Sequence[int], drifts: Sequence[int], within: int) -> int:
    """Return how many alarms came without a drift in the ``within`` samples before them.

    >>> false_alarms([20, 130, 140, 260], drifts=[100, 300], within=100)
    2
    """
    return sum(all(not 0 <= alarm - drift <= within for drift in drifts) for alarm in alarms)


def recovery(accuracy: ArrayLike, drift: int, share: float = 0.95) -> float:
    """Return the samples from a drift until the accuracy is back at a share of what it was.

    Parameters
    ----------
    accuracy : array-like, shape (N,)
        After each sample, as `prequential_accuracy` gives it, until the next drift.
    drift : int
        Position of the first changed sample.
    share : float
        Of the accuracy just before it.

    Returns
    -------
    float
        0 if it never fell below; NaN if it did not come back.

    Examples
    --------
    >>> recovery([0.8, 0.8, 0.7, 0.5, 0.6, 0.77], drift=2)
    3.0
    """
    series = np.asarray(accuracy, float)
    if not 0 < drift < len(series):
        raise StreamError(f"the drift at {drift} is not inside of {len(series)} samples")
    below = series[drift:] < share * series[drift - 1]
    if not below.any():
        return 0.0
    fell = int(below.argmax())
    back = ~below[fell:]
    return float(fell + back.argmax()) if back.any() else math.nan


def _square(table: ArrayLike, least: int = 1) -> NDArray[np.float64]:
    accuracies = np.asarray(table, np.float64)
    if accuracies.ndim != 2 or len(set(accuracies.shape)) != 1 or len(accuracies) < least:
        raise StreamError(
            f"a table of accuracies has as many rows as tasks, at least {least}, not the shape {accuracies.shape}"
        )
    return accuracies
