"""The best linear head in closed form: ridge regression from sums over examples.

Features are standardised. How strongly large weights are held down is chosen by the error on examples that are held
out: folds of all clients' examples are left out of the sums in turn, exactly, and no example is seen. So the choice
stands where features are more than examples, and where examples are equal. On whatever clients the examples lie,
the head is the one of all of them together (Fed3R, Fani et al., ICML 2024, without its fixed penalty).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.head_sums import HeadSums
from fl_elastic.update.ridge import PENALTIES, STILL, Ridge, RidgeSystem, least_from

__all__ = [
    "ClosedFormHead",
    "as_scores",
    "best_ridge",
    "closed_form_head",
    "inner_mean",
    "stretch",
]

_Floats = NDArray[np.float64]
# Least squares say how far an example's own class lies above the others in the mean; class scores are stretched so
# that this is as sure as it is right, within these bounds: no example is sure for certain.
_LEAST_SURE, _MOST_SURE = 0.05, 0.95
# Where the best penalty is looked for first: 0.1.
_START = 6
# Of the clients one of so many, at either end, does not decide which penalty it is.
_OUTER = 5


@dataclass(frozen=True, eq=False)
class ClosedFormHead:
    """Weight and bias of a linear layer.

    Attributes
    ----------
    weight : array, shape (C, D)
    bias : array, shape (C,)
    penalty : float
        Of the squared weights of standardised features, in shares of the number of examples.
    error : float
        Mean squared error on held-out examples, over what the mean alone gives; 1 where none could be held out, and
        at most.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    penalty: float
    error: float


def closed_form_head(*sums: HeadSums, intercept: bool = True) -> ClosedFormHead:
    """Return the head that minimises squared error plus a penalty, the one that suits held-out examples best.

    Class scores are stretched, so that their softmax is a fair start for training. Each client's held-out examples
    say what error each penalty has; of many clients the fifth at either end does not count. Where no example can be
    held out, as of a single one, the strongest penalty is taken.

    Parameters
    ----------
    *sums : HeadSums
        Of each client.
    intercept : bool
        Whether the layer has a bias.

    Examples
    --------
    >>> from fl_elastic.update.folds import Fold
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
    """Return the regression with the penalty of least error on held-out examples, and that error.

    Raises
    ------
    UpdateError
        If no penalty makes these the sums of examples.
    """
    examples = np.sum([part.examples for part in system.held_out], axis=0)
    known = np.atleast_1d(examples) > 0
    if not known.any() or system.variance <= 0:
        return system.solved(float(PENALTIES[-1])), 1.0 if system.variance > 0 else 0.0
    found: list[tuple[float, Ridge]] = []

    def error(place: int) -> float:
        try:
            ridge = system.solved(float(PENALTIES[place]))
            squared = np.sum([each.squared_errors() for each in ridge.without], axis=0)
        except UpdateError:
            # Sums that rounding, or a lie, made impossible take a stronger one.
            return np.inf
        means = squared[known] / examples[known] / system.variance
        tried = inner_mean(means, examples[known]), ridge
        # Only the best one is kept: each holds matrices of D x D numbers.
        found[:] = [min([*found, tried], key=lambda each: each[0])]
        return tried[0]

    least_from(_START, error)
    for place in range(_START + 2, len(PENALTIES)):
        if not found:
            error(place)
    if not found:
        raise UpdateError("these are not the sums of examples: no regression fits them")
    least, ridge = found[0]
    return ridge, min(least, 1.0)


def as_scores(
    sums: HeadSums, weight: _Floats, bias: _Floats, penalty: float, error: float
) -> ClosedFormHead:
    """Return a solved layer as a head: where targets are classes its scores are stretched, about a mean of zero.

    Parameters
    ----------
    sums : HeadSums
        Which the layer was solved from.
    weight, bias : array, shapes (D, C) and (C,)
        Of the layer.
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
    """Return the mean without the largest and the smallest fifth, at least one of three or more.

    >>> inner_mean(np.array([0.3, 9.0, 0.1, 0.5]), np.ones(4))
    0.4
    """
    order = values.argsort()
    outer = min(-(-len(order) // _OUTER), (len(order) - 1) // 2)
    inner = order[outer : len(order) - outer]
    return float(np.average(values[inner], weights=weights[inner]))


def stretch(sums: HeadSums, weight: _Floats, bias: _Floats) -> float:
    """Return the factor, at least 1, by which class scores are as sure as they are right in the mean.

    Parameters
    ----------
    sums : HeadSums
        Of all examples, for classes; their products are not looked at, but for the number of examples.
    weight : array, shape (D, C)
    bias : array, shape (C,)
    """
    classes = len(bias)
    examples = float(sums.products[-1, -1])
    own = float((weight * sums.targets[:-1]).sum() + (bias * sums.targets[-1]).sum()) / examples
    others = (1.0 - own) / max(classes - 1, 1)
    margin = own - others
    if classes < 2 or margin <= STILL:
        return 1.0
    sure = min(max(own, _LEAST_SURE), _MOST_SURE)
    return max(float(np.log(sure * (classes - 1) / (1 - sure))) / margin, 1.0)
