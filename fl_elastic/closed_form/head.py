"""The best linear head in closed form: ridge regression from sums over examples.

Features are standardised. The penalty on large weights is chosen by the error on held-out examples: folds of all
clients' examples are left out of the sums in turn, exactly, without access to any example. So the choice is also
valid if there are more features than examples, or if examples are equal. The head is that of all examples together,
however they are distributed over clients (Fed3R, Fani et al., ICML 2024, without its fixed penalty).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.claims import outer
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.ridge import PENALTIES, Ridge, RidgeSystem, least_from, nearest_penalty
from fl_elastic.errors import UpdateError

_Floats = NDArray[np.float64]
# Least squares give the mean score of an example's own class, and of the other classes. Class scores are scaled up
# so that their softmax gives the own class its mean score as probability, within these bounds.
_LEAST_SURE, _MOST_SURE = 0.05, 0.95
# Difference of mean scores below which the head does not distinguish classes at all.
_NO_MARGIN = 1e-6
# Index of the penalty at which the search begins.
_START = nearest_penalty(0.1)


@dataclass(frozen=True, eq=False)
class ClosedFormHead:
    """Weight and bias of a linear layer.

    Attributes
    ----------
    weight : array, shape (C, D)
    bias : array, shape (C,)
    penalty : float
        Penalty on the squared weights of standardised features, as a share of the number of examples.
    error : float
        Mean squared error on held-out examples, relative to predicting the mean; at most 1, and 1 if no example
        could be held out.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    penalty: float
    error: float


def closed_form_head(*sums: HeadSums, intercept: bool = True) -> ClosedFormHead:
    """Return the head that minimises squared error plus a penalty; the penalty is chosen on held-out examples.

    Class scores are scaled up, so that their softmax is a good start for training. The error of each penalty is
    measured on each client's held-out examples. The fifths of the clients with the lowest and the highest errors
    are ignored, and so are clients with a single class, if others have several. If no example can be held out, as
    with a single example, the strongest penalty is taken.

    Parameters
    ----------
    *sums : HeadSums
        Sums of each client.
    intercept : bool
        Whether the layer has a bias.

    Examples
    --------
    >>> from fl_elastic.closed_form.folds import Fold
    >>> x, folds = np.arange(10.0)[:, None], []
    >>> for part in range(5):
    ...     folds.append(Fold.of(x[part::5], 2 * x[part::5] + 1))
    >>> head = closed_form_head(HeadSums.of_folds("w", folds, 1, 1, False))
    >>> np.round([head.weight[0, 0], head.bias[0]], 2).tolist()
    [2.0, 1.0]
    """
    ridge, error = best_ridge(RidgeSystem.of(sums, intercept))
    return as_scores(ridge.system.total, *ridge.layer(), ridge.penalty, error)


def best_ridge(system: RidgeSystem) -> tuple[Ridge, float]:
    """Return the regression with the penalty of least held-out error, and that error.

    Raises
    ------
    UpdateError
        If no penalty makes the sums solvable, so that they are not sums of examples.
    """
    examples = np.sum([part.examples for part in system.held_out], axis=0)
    known, variance = np.atleast_1d(examples) > 0, system.variance
    if not known.any() or variance <= 0:
        return Ridge(system, float(PENALTIES[-1])), 1.0 if variance > 0 else 0.0
    # For a client with a single class, a head that predicts only this class is best. So clients with several
    # classes decide on the penalty.
    classes = np.array([np.count_nonzero(each.squares) for each in system.sums])
    tell = known & (classes > 1)
    if system.total.classes and tell.any() and (tell != known).any():
        squared = np.sum([part.squared_targets() for part in system.held_out], axis=0)
        known, variance = tell, float(squared[tell].sum() / examples[tell].sum())
    found: list[tuple[float, Ridge]] = []

    def error(place: int) -> float:
        try:
            ridge = Ridge(system, float(PENALTIES[place]))
            squared = np.sum([part.squared_errors() for part in ridge.without], axis=0)
        except UpdateError:
            # Sums that are inconsistent, by rounding or a false report, need a stronger penalty.
            return np.inf
        means = squared[known] / examples[known] / variance
        tried = inner_mean(means, examples[known]), ridge
        # Keep only the best regression, because each holds matrices of D x D numbers.
        found[:] = [min([*found, tried], key=lambda pair: pair[0])]
        return tried[0]

    least_from(_START, error)
    if not found or found[0][0] > 1.0:
        # If features hardly explain the targets, errors may fall again with a stronger penalty, towards the mean's.
        for place in range(_START + 2, len(PENALTIES)):
            error(place)
    if not found:
        raise UpdateError("these are not the sums of examples: no regression fits them")
    least, ridge = found[0]
    return ridge, min(least, 1.0)


def penalties_tried(best: float) -> int:
    """Return how many penalties `best_ridge` compares if ``best`` is the best one.

    >>> penalties_tried(0.1), penalties_tried(1.0), penalties_tried(100.0)
    (3, 5, 8)
    """
    place = nearest_penalty(best)
    return min(max(place, _START) + 1, len(PENALTIES) - 1) - max(min(place, _START) - 1, 0) + 1


def as_scores(
    sums: HeadSums, weight: _Floats, bias: _Floats, penalty: float, error: float
) -> ClosedFormHead:
    """Return a solved layer as a head; for classes, scores are scaled up (`stretch`) and biases centred at zero.

    Parameters
    ----------
    sums : HeadSums
        The sums from which the layer was solved.
    weight, bias : array, shapes (D, C) and (C,)
        Weight and bias of the layer.
    penalty, error : float
        See `ClosedFormHead`.
    """
    factor = stretch(sums, weight, bias) if sums.classes else 1.0
    offset = factor * (bias - bias.mean()) if sums.classes else bias
    return ClosedFormHead(
        weight=(factor * weight.T).astype(np.float32),
        bias=offset.astype(np.float32),
        penalty=penalty,
        error=error,
    )


def inner_mean(values: _Floats, weights: _Floats) -> float:
    """Return the weighted mean without the largest and the smallest fifth (`fl_elastic.claims.outer`).

    >>> inner_mean(np.array([0.3, 9.0, 0.1, 0.5]), np.ones(4))
    0.4
    """
    order = values.argsort()
    left_out = outer(len(order))
    inner = order[left_out : len(order) - left_out]
    return float(np.average(values[inner], weights=weights[inner]))


def stretch(sums: HeadSums, weight: _Floats, bias: _Floats) -> float:
    """Return the factor, at least 1, that makes class scores as confident as they are correct on average.

    Parameters
    ----------
    sums : HeadSums
        Sums of all examples with classes as targets; of their products only the number of examples is used.
    weight : array, shape (D, C)
    bias : array, shape (C,)
    """
    classes = len(bias)
    examples = float(sums.products[-1, -1])
    own = float((weight * sums.targets[:-1]).sum() + (bias * sums.targets[-1]).sum()) / examples
    others = (1.0 - own) / max(classes - 1, 1)
    margin = own - others
    if classes < 2 or margin <= _NO_MARGIN:
        return 1.0
    sure = min(max(own, _LEAST_SURE), _MOST_SURE)
    return max(float(np.log(sure * (classes - 1) / (1 - sure))) / margin, 1.0)
