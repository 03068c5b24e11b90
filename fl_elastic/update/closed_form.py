"""The best linear head in closed form: ridge regression from sums over examples.

Features are standardised. How strongly large weights are held down is chosen by the error on examples that are held
out: folds of all clients' examples are left out of the sums in turn, exactly, and no example is seen. So the choice
stands where features are more than examples, and where examples are equal. On whatever clients the examples lie,
the head is the one of all of them together (Fed3R, Fani et al., ICML 2024, without its fixed penalty).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.folds import Fold
from fl_elastic.update.head_sums import HeadSums

__all__ = [
    "PARTS",
    "PENALTIES",
    "STILL",
    "ClosedFormHead",
    "as_scores",
    "closed_form_head",
    "held_out_in",
    "inner_mean",
    "parts_held_out",
    "stretch",
]

PARTS = 5
"""All clients' examples are left out in so many parts."""

STILL = 1e-6
"""A feature that moves less than this share of the one that moves most says nothing but noise."""

_Floats = NDArray[np.float64]
# In shares of the number of examples.
PENALTIES = 10.0 ** np.arange(-4, 2.01, 0.5)
# Least squares say how far an example's own class lies above the others in the mean; class scores are stretched so
# that this is as sure as it is right, within these bounds: no example is sure for certain.
_LEAST_SURE, _MOST_SURE = 0.05, 0.95
# Of all examples this share is none.
_NOTHING_LEFT = 1e-6
# Where the best penalty is looked for first: 0.1.
_START = 6
# With so many examples held out, no more parts are.
_ENOUGH = 1000
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
    >>> x, folds = np.arange(10.0)[:, None], []
    >>> for part in range(5):
    ...     folds.append(Fold.of(x[part::5], 2 * x[part::5] + 1))
    >>> head = closed_form_head(HeadSums.of_folds("w", folds, 1, 1, False))
    >>> np.round([head.weight[0, 0], head.bias[0]], 2).tolist()
    [2.0, 1.0]
    """
    total = _together(sums)
    system = _System.of(total, intercept)
    penalty, error = _best_penalty(system, sums)
    return as_scores(total, *system.layer(penalty), penalty, error)


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


def _together(sums: Sequence[HeadSums]) -> HeadSums:
    """Return the sums of all, without their folds."""
    return reduce(HeadSums.__add__, (each.without_folds() for each in sums))


@dataclass(frozen=True, eq=False)
class _System:
    """Standardised features, turned so that their products are diagonal.

    Attributes
    ----------
    examples : float
        How many.
    mean, scale : array, shape (D,)
        By which features are standardised; the scale of one that stands still is infinite.
    goal : array, shape (C,)
        Means of the targets.
    vectors : array, shape (D, D)
        By which they are turned.
    values : array, shape (D,)
        Their mean squares then.
    turned : array, shape (D, C)
        Their mean products with the targets.
    variance : float
        Of all targets.
    intercept : bool
        Whether means are taken off.
    """

    examples: float
    mean: _Floats
    scale: _Floats
    goal: _Floats
    vectors: _Floats
    values: _Floats
    turned: _Floats
    variance: float
    intercept: bool

    @classmethod
    def of(cls, sums: HeadSums, intercept: bool) -> _System:
        examples = float(sums.products[-1, -1])
        mean, goal = sums.products[-1, :-1] / examples, sums.targets[-1] / examples
        if not intercept:
            mean, goal = np.zeros_like(mean), np.zeros_like(goal)
        spread = np.sqrt(np.maximum(np.diag(sums.products)[:-1] / examples - mean**2, 0.0))
        scale = np.where(
            spread > STILL * max(float(spread.max(initial=0.0)), STILL), spread, np.inf
        )
        products = sums.products[:-1, :-1] / examples
        products -= np.outer(mean, mean)
        products /= np.outer(scale, scale)
        targets = (sums.targets[:-1] / examples - np.outer(mean, goal)) / scale[:, None]
        values, vectors = np.linalg.eigh(products)
        return cls(
            examples, mean, scale, goal, vectors, np.maximum(values, 0.0), vectors.T @ targets,
            float(np.maximum(sums.squares / examples - goal**2, 0.0).sum()), intercept,
        )  # fmt: skip

    def layer(self, penalty: float) -> tuple[_Floats, _Floats]:
        """Return weight, of shape (D, C), and bias."""
        weight = (self.vectors @ (self.turned / (self.values + penalty)[:, None])) / self.scale[
            :, None
        ]
        return weight, self.goal - self.mean @ weight

    def of_fold(self, fold: Fold) -> tuple[_Floats, _Floats]:
        """Return a fold's rows and targets in this system, a constant last if there is an intercept."""
        constant = fold.rows[:, -1:]
        rows = ((fold.rows[:, :-1] - constant * self.mean) / self.scale) @ self.vectors
        if self.intercept:
            rows = np.hstack([rows, constant])
        return rows, fold.targets - constant * self.goal

    def errors_without(self, fold: Fold) -> Callable[[float], _Floats]:
        """Return what by a penalty gives what the head found without a fold leaves of the fold's targets.

        With few rows by the inverse of what the head of all of them leaves (Cook and Weisberg, 1982, for one row).
        """
        rows, targets = self.of_fold(fold)
        examples = self.examples - fold.num_examples
        products = self.examples * self.turned
        values = self.examples * self.values
        if self.intercept:
            products = np.vstack([products, np.zeros_like(self.goal)])
        few = 2 * len(rows) < len(products)
        own = rows.T @ rows if not few else None

        def left(penalty: float) -> _Floats:
            diagonal = values + penalty * examples
            if self.intercept:
                diagonal = np.append(diagonal, self.examples)
            if own is None:
                scaled = rows / diagonal
                system = np.eye(len(rows)) - scaled @ rows.T
                return np.asarray(np.linalg.solve(system, targets - scaled @ products))
            weight = np.linalg.solve(np.diag(diagonal) - own, products - rows.T @ targets)
            return np.asarray(targets - rows @ weight)

        return left


def _best_penalty(system: _System, sums: Sequence[HeadSums]) -> tuple[float, float]:
    """Return the penalty of least error on held-out examples, and that error.

    Errors fall towards the best penalty from either side, so that its neighbours tell the way to it.
    """
    held = list(_held_out(system, sums))
    examples = np.zeros(len(sums))
    for each in held:
        examples += each.examples
    known = examples > 0
    if not known.any() or system.variance <= 0:
        return float(PENALTIES[-1]), 1.0 if system.variance > 0 else 0.0

    @cache
    def error(place: int) -> float:
        squared = sum(each.squared_errors(float(PENALTIES[place])) for each in held)
        means = np.asarray(squared)[known] / examples[known] / system.variance
        return inner_mean(means, examples[known])

    best = _START
    while True:
        around = [place for place in (best, best - 1, best + 1) if 0 <= place < len(PENALTIES)]
        found = min(around, key=error)
        if found == best:
            return float(PENALTIES[best]), min(error(best), 1.0)
        best = found


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """One part that is held out, of which clients, and what a head from the rest leaves of it."""

    folds: dict[int, Fold]
    examples: _Floats
    left: Callable[[float], _Floats]

    def squared_errors(self, penalty: float) -> _Floats:
        """Return the squared errors by client."""
        errors = np.zeros(len(self.examples))
        ends = np.cumsum([len(fold.rows) for fold in self.folds.values()])[:-1]
        parts = np.split(self.left(penalty), ends)
        for (client, fold), own in zip(self.folds.items(), parts, strict=True):
            errors[client] = (own**2).sum() + fold.unexplained
        return errors


def _held_out(system: _System, sums: Sequence[HeadSums]) -> Iterator[_HeldOut]:
    for part in parts_held_out(sums):
        out = held_out_in(part, sums)
        whole = reduce(Fold.__add__, out.values())
        examples = np.zeros(len(sums))
        for client, fold in out.items():
            examples[client] = fold.num_examples
        yield _HeldOut(out, examples, system.errors_without(whole))


def parts_held_out(sums: Sequence[HeadSums]) -> list[int]:
    """Return which parts are held out in turn: all, or as many as have enough examples, and two at least."""
    found: list[int] = []
    examples = 0.0
    for part in range(PARTS):
        out = held_out_in(part, sums)
        if out and (examples < _ENOUGH or len(found) < 2):
            found.append(part)
            examples += sum(fold.num_examples for fold in out.values())
    return found


def held_out_in(part: int, sums: Sequence[HeadSums]) -> dict[int, Fold]:
    """Return what is left out of all sums as one of the parts, by client; nothing if that were everything.

    Of a client with few folds they are left out at other times than those of the next.
    """
    out: dict[int, Fold] = {}
    for client, each in enumerate(sums):
        own = [fold for number, fold in enumerate(each.folds) if (number + client) % PARTS == part]
        if own:
            out[client] = reduce(Fold.__add__, own)
    examples = sum(float(each.products[-1, -1]) for each in sums)
    left = examples - sum(fold.num_examples for fold in out.values())
    return out if left > _NOTHING_LEFT * examples else {}


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
