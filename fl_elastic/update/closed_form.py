"""The best linear head in closed form: ridge regression from sums over examples.

Features are standardised, and how strongly large weights are held down is chosen by generalised cross-validation
(Golub, Heath and Wahba, Technometrics 1979), which needs the sums alone. On whatever clients the examples lie, the
head is the one of all of them together (Fed3R, Fani et al., ICML 2024, without its fixed penalty).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.head_sums import HeadSums

__all__ = ["ClosedFormHead", "closed_form_head"]

_Floats = NDArray[np.float64]
# In shares of the number of examples.
_PENALTIES = 10.0 ** np.arange(-4, 2.01, 0.25)
# A feature that moves less than this share of the one that moves most says nothing but noise.
_STILL = 1e-6
# Least squares say how far an example's own class lies above the others in the mean; class scores are stretched so
# that this is as sure as it is right, within these bounds: no example is sure for certain.
_LEAST_SURE, _MOST_SURE = 0.05, 0.95


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
        Mean squared error that is to be expected on new examples, over what the mean alone gives.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    penalty: float
    error: float


def closed_form_head(sums: HeadSums, *, intercept: bool = True) -> ClosedFormHead:
    """Return the head that minimises squared error plus a penalty, with the penalty that suits new examples best.

    Class scores are stretched, so that their softmax is a fair start for training.

    Parameters
    ----------
    sums : HeadSums
        Over all examples.
    intercept : bool
        Whether the layer has a bias.

    Examples
    --------
    >>> x = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> rows = np.hstack([x, np.ones((4, 1))])
    >>> y = 2 * x + 1
    >>> head = closed_form_head(HeadSums("w", rows.T @ rows, rows.T @ y, (y**2).sum(axis=0), False))
    >>> np.round([head.weight[0, 0], head.bias[0]], 2).tolist()
    [2.0, 1.0]
    """
    examples = float(sums.products[-1, -1])
    mean, goal = sums.products[-1, :-1] / examples, sums.targets[-1] / examples
    if not intercept:
        mean, goal = np.zeros_like(mean), np.zeros_like(goal)
    spread = np.sqrt(np.maximum(np.diag(sums.products)[:-1] / examples - mean**2, 0.0))
    scale = np.where(spread > _STILL * max(float(spread.max(initial=0.0)), _STILL), spread, np.inf)
    products = (sums.products[:-1, :-1] / examples - np.outer(mean, mean)) / np.outer(scale, scale)
    targets = (sums.targets[:-1] / examples - np.outer(mean, goal)) / scale[:, None]
    total = float(np.maximum(sums.squares / examples - goal**2, 0.0).sum())
    values, vectors = np.linalg.eigh(products)
    values = np.maximum(values, 0.0)
    turned = vectors.T @ targets
    penalty, error = _best_penalty(values, (turned**2).sum(axis=1), total, examples)
    weight = (vectors @ (turned / (values + penalty)[:, None])) / scale[:, None]
    bias = goal - mean @ weight
    stretch = _stretch(sums, weight, bias) if sums.classes else 1.0
    offset = stretch * (bias - bias.mean()) if sums.classes else bias
    return ClosedFormHead(
        weight=(stretch * weight.T).astype(np.float32),
        bias=offset.astype(np.float32),
        penalty=penalty,
        error=error / total if total > 0 else 0.0,
    )


def _best_penalty(
    values: _Floats, powers: _Floats, total: float, examples: float
) -> tuple[float, float]:
    """Return the penalty of least expected error, and that error."""
    kept = values[:, None] / (values[:, None] + _PENALTIES)
    explained = (powers[:, None] * (2 - kept) / (values[:, None] + _PENALTIES)).sum(axis=0)
    left = np.maximum(total - explained, 0.0)
    # The mean takes one degree of freedom.
    free = 1.0 - (1.0 + kept.sum(axis=0)) / examples
    expected = np.where(free > 0, left / np.maximum(free, 1e-12) ** 2, np.inf)
    # Where there are fewer examples than features to be free, the strongest penalty is left.
    best = int(expected.argmin()) if np.isfinite(expected).any() else len(_PENALTIES) - 1
    return float(_PENALTIES[best]), float(min(expected[best], total))


def _stretch(sums: HeadSums, weight: _Floats, bias: _Floats) -> float:
    """Return the factor by which class scores are as sure as they are right in the mean."""
    classes = len(bias)
    examples = float(sums.products[-1, -1])
    own = float((weight * sums.targets[:-1]).sum() + (bias * sums.targets[-1]).sum()) / examples
    others = (1.0 - own) / max(classes - 1, 1)
    margin = own - others
    if classes < 2 or margin <= _STILL:
        return 1.0
    sure = min(max(own, _LEAST_SURE), _MOST_SURE)
    return max(float(np.log(sure * (classes - 1) / (1 - sure))) / margin, 1.0)
