"""Ridge regression from the sums of several clients, on all examples and without each held-out part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.closed_form.folds import FOLDS, Fold
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.errors import UpdateError

PENALTIES = 10.0 ** np.arange(-4, 2.01, 0.5)
"""Candidate penalties, as shares of the number of examples."""

_Floats = NDArray[np.float64]
# If less than this share of the examples remains, none does, up to rounding.
_NOTHING_LEFT = 1e-6
# Once this many examples are held out, no further part is needed.
_ENOUGH = 640
# A standard deviation below this share of the mean may be a rounding error of fp64 sums.
_CONSTANT = 3e-7
# Weights of features with a smaller standard deviation might be too large for fp32.
_LEAST = 1e-30
# Down to this penalty, errors on held-out examples are compared in fp32, which takes half of the time.
_ROUNDED = 0.01


def nearest_penalty(penalty: float) -> int:
    """Return the index of the candidate nearest to a penalty, on a logarithmic scale.

    >>> float(PENALTIES[nearest_penalty(0.9)])
    1.0
    """
    return int(np.abs(np.log(PENALTIES / penalty)).argmin())


def least_from(start: int, error: Callable[[int], float]) -> tuple[int, float]:
    """Return the index of the penalty with the least error, and that error, by descent from index ``start``.

    The search assumes that errors fall towards the best penalty from either side.

    Examples
    --------
    >>> least_from(8, lambda penalty: abs(penalty - 2.0))
    (2, 0.0)
    """
    known: dict[int, float] = {}
    best = start
    while True:
        around = [near for near in (best, best - 1, best + 1) if 0 <= near < len(PENALTIES)]
        for near in around:
            if near not in known:
                known[near] = error(near)
        found = min(around, key=known.__getitem__)
        if found == best:
            return best, known[best]
        best = found


def varies(spread: _Floats, mean: _Floats) -> NDArray[np.bool_]:
    """Return which features vary by more than rounding errors, given their standard deviations and means.

    Each feature is compared with its own mean: columns of a table may differ in scale by any factor.

    Examples
    --------
    >>> varies(np.array([1e-9, 1e9, 1e-9, 0.0]), np.array([0.0, 5.0, 3.0, 0.0])).tolist()
    [True, True, False, False]
    """
    return np.asarray(spread > np.maximum(_CONSTANT * np.abs(mean), _LEAST))


def precise_enough(penalty: float) -> type[np.floating]:
    """Return the type in which errors on held-out examples with this penalty are computed.

    Features are standardised, so that the penalty bounds the condition of the system.
    """
    return np.float32 if penalty >= _ROUNDED else np.float64


@dataclass(frozen=True, eq=False)
class RidgeSystem:
    """Sums of all clients' examples with standardised features, a constant 1 last if there is an intercept.

    Attributes
    ----------
    sums : tuple of HeadSums
        Sums of each client.
    total : HeadSums
        Sums of all clients, without folds.
    mean, scale : array, shape (D,)
        Mean and scale by which features are standardised; the scale of a constant feature is infinite.
    goal : array, shape (C,)
        Mean targets.
    intercept : bool
        Whether means are subtracted.
    products : array, shape (D, D) or (D + 1, D + 1)
        Products of features with each other.
    targets : array, shape (D, C) or (D + 1, C)
        Products of features with targets about their mean.
    """

    sums: tuple[HeadSums, ...]
    total: HeadSums
    mean: _Floats
    scale: _Floats
    goal: _Floats
    intercept: bool

    @classmethod
    def of(cls, sums: Sequence[HeadSums], intercept: bool) -> RidgeSystem:
        """Return the system for these clients' sums, for a layer with or without a bias."""
        total = HeadSums.total(sums)
        examples = float(total.products[-1, -1])
        mean, goal = total.products[-1, :-1] / examples, total.targets[-1] / examples
        if not intercept:
            mean, goal = np.zeros_like(mean), np.zeros_like(goal)
        spread = np.sqrt(np.maximum(np.diag(total.products)[:-1] / examples - mean**2, 0.0))
        scale = np.where(varies(spread, mean), spread, np.inf)
        return cls(tuple(sums), total, mean, scale, goal, intercept)

    @property
    def examples(self) -> float:
        """Number of examples of the sums."""
        return float(self.total.products[-1, -1])

    @property
    def variance(self) -> float:
        """Variance of the targets, summed over outputs."""
        squares = self.total.squares / self.examples - self.goal**2
        return float(np.maximum(squares, 0.0).sum())

    @cached_property
    def products(self) -> _Floats:
        """Products of features with each other."""
        raw, features = self.total.products, len(self.mean)
        found = np.zeros((features + self.intercept,) * 2)
        # A view: features are standardised in place.
        own = found[:features, :features]
        np.subtract(raw[:-1, :-1], np.outer(self.mean, self.examples * self.mean), out=own)
        own /= self.scale[:, None]
        own /= self.scale
        if self.intercept:
            found[-1, -1] = self.examples
        return found

    @cached_property
    def targets(self) -> _Floats:
        """Products of features with targets about their mean."""
        return self.standard(self.about_goal(self.total))

    def about_goal(self, sums: HeadSums) -> _Floats:
        """Return products of features, with a constant 1 appended, and targets about the overall mean."""
        return np.asarray(sums.targets - np.outer(sums.products[:, -1], self.goal))

    def standard(self, products: _Floats) -> _Floats:
        """Return products of features, with a constant 1 appended, as they would be with standardised features.

        Parameters
        ----------
        products : array, shape (D + 1, K)
            Products; the result has D rows, and one more if there is an intercept.
        """
        moved = (products[:-1] - np.outer(self.mean, products[-1])) / self.scale[:, None]
        return np.vstack([moved, products[-1:]]) if self.intercept else moved

    def plain(self, weight: _Floats) -> _Floats:
        """Convert a weight for standardised features to one for raw features with a constant 1 appended."""
        features = weight[: len(self.mean)] / self.scale[:, None]
        constant = weight[-1] if self.intercept else 0.0
        return np.vstack([features, constant - self.mean @ features])

    def ridge(self, penalty: float) -> _Floats:
        """Return the penalty's addition to the diagonal of the products; it is zero for the constant."""
        held = np.full(len(self.mean), penalty * self.examples)
        return np.append(held, 0.0) if self.intercept else held

    def factor(
        self, products: _Floats, penalty: float, kind: type[np.floating] = np.float64
    ) -> Tensor:
        """Return the Cholesky factor of products plus a penalty; raise UpdateError if not positive definite."""
        held = products.astype(kind)
        held[np.diag_indices(len(held))] += self.ridge(penalty)
        return _factor(torch.from_numpy(held))

    @cached_property
    def held_out(self) -> tuple[HeldOutPart, ...]:
        """Parts that are held out in turn: the first ones with enough examples of most clients, or else all."""
        found: list[HeldOutPart] = []
        examples = np.zeros(len(self.sums))
        for part in range(FOLDS):
            enough = examples.sum() >= _ENOUGH and 2 * (examples > 0).sum() > len(examples)
            if not enough and (out := self._held_out_in(part)):
                found.append(HeldOutPart.of(self, out))
                examples += found[-1].examples
        return tuple(found)

    def _held_out_in(self, part: int) -> dict[int, Fold]:
        """Return by client the folds of one part to leave out of the sums; empty if no example would remain.

        The fold numbers of successive clients are shifted, so that clients with few folds are spread over the
        parts.
        """
        out: dict[int, Fold] = {}
        for client, each in enumerate(self.sums):
            own = [
                fold for number, fold in enumerate(each.folds) if (number + client) % FOLDS == part
            ]
            if own:
                out[client] = reduce(Fold.__add__, own)
        left = self.examples - sum(fold.num_examples for fold in out.values())
        return out if left > _NOTHING_LEFT * self.examples else {}


@dataclass(frozen=True, eq=False)
class HeldOutPart:
    """Examples of several clients that are held out together.

    Attributes
    ----------
    system : RidgeSystem
        System of all examples.
    rows : array, shape (R, D) or (R, D + 1)
        Standardised features, with a constant appended if there is an intercept.
    targets : array, shape (R, C)
        Targets about their mean.
    whose : dict of int to slice
        Slice of the rows of each client.
    examples, unexplained : array, shape (clients,)
        Number of examples behind the rows, and sum of squared targets that no layer can explain, by client.
    """

    system: RidgeSystem
    rows: _Floats
    targets: _Floats
    whose: dict[int, slice]
    examples: _Floats
    unexplained: _Floats

    @classmethod
    def of(cls, system: RidgeSystem, folds: dict[int, Fold]) -> HeldOutPart:
        """Return the held-out part that consists of the clients' ``folds``, standardised as in the system."""
        whole = reduce(Fold.__add__, folds.values())
        constant = whole.rows[:, -1]
        ends = np.cumsum([len(fold.rows) for fold in folds.values()]).tolist()
        examples, unexplained = np.zeros((2, len(system.sums)))
        for client, fold in folds.items():
            examples[client], unexplained[client] = fold.num_examples, fold.unexplained
        return cls(
            system=system,
            rows=system.standard(whole.rows.T).T,
            targets=whole.targets - np.outer(constant, system.goal),
            whose={
                client: slice(end - len(fold.rows), end)
                for (client, fold), end in zip(folds.items(), ends, strict=True)
            },
            examples=examples,
            unexplained=unexplained,
        )

    def squared_targets(self) -> _Floats:
        """Return the sum of squared targets about their mean of each client's examples."""
        squares = self.unexplained.copy()
        for client, rows in self.whose.items():
            squares[client] += (self.targets[rows] ** 2).sum()
        return squares

    @cached_property
    def rest(self) -> _Floats | None:
        """Products of the features of the other examples; None if the part has so few rows that they do not pay.

        With D features and R rows, factors take D^3 / 3 operations with these products, and D^2 R + D R^2 + R^3 / 3
        without them.
        """
        rows, features = self.rows.shape
        if features**3 / 3 > features**2 * rows + features * rows**2 + rows**3 / 3:
            return None
        # NumPy does half of the work when an array is multiplied by its own transpose.
        held = self.rows.T @ self.rows
        return np.subtract(self.system.products, held, out=held)


@dataclass(frozen=True, eq=False)
class Ridge:
    """The regression with one penalty, on all examples and without each held-out part.

    Attributes
    ----------
    system : RidgeSystem
        System of all examples.
    penalty : float
        Penalty as a share of the number of all examples, held-out ones included.
    """

    system: RidgeSystem
    penalty: float

    @cached_property
    def factor(self) -> Tensor:
        """Lower Cholesky factor of the products of features plus the penalty."""
        return self.system.factor(self.system.products, self.penalty)

    @cached_property
    def weight(self) -> _Floats:
        """Weight for standardised features and targets about their mean."""
        return _solved(self.factor, self.system.targets)

    def layer(self) -> tuple[_Floats, _Floats]:
        """Return weight, of shape (D, C), and bias, for plain features."""
        plain = self.system.plain(self.weight)
        return plain[:-1], self.system.goal + plain[-1]

    @cached_property
    def without(self) -> tuple[RidgeWithout, ...]:
        """For each held-out part, the regression on all other examples."""
        return tuple(RidgeWithout.of(self, part) for part in self.system.held_out)


@dataclass(frozen=True, eq=False)
class RidgeWithout:
    """A regression without a part of its examples.

    If the part has few rows, its residuals follow from those of the regression on all examples by inverting a small
    matrix (Cook and Weisberg, 1982, for one row).

    Attributes
    ----------
    system : RidgeSystem
        System of all examples.
    penalty : float
        Penalty as a share of the number of all examples.
    part : HeldOutPart
        The part that is left out.
    factor : tensor
        Factor of the remaining products; if there are few rows, of the identity minus the products of ``half``.
    half : tensor, optional
        Inverse of the factor of all examples times the part's rows, if there are few rows.
    of_all : tuple of tensor and array, optional
        Factor and weight of the regression on all examples, if there are few rows.
    """

    system: RidgeSystem
    penalty: float
    part: HeldOutPart
    factor: Tensor
    half: Tensor | None = None
    of_all: tuple[Tensor, _Floats] | None = None

    @classmethod
    def of(cls, whole: Ridge, part: HeldOutPart) -> RidgeWithout:
        """Return the regression without a part."""
        system, penalty = whole.system, whole.penalty
        if part.rest is not None:
            factor = system.factor(part.rest, penalty, precise_enough(penalty))
            return cls(system, penalty, part, factor)
        rows = torch.from_numpy(part.rows)
        half = torch.linalg.solve_triangular(whole.factor, rows.T, upper=False)
        left = np.eye(len(rows)) - half.numpy().T @ half.numpy()
        factor = _factor(torch.from_numpy(left))
        return cls(system, penalty, part, factor, half, (whole.factor, whole.weight))

    @cached_property
    def weight(self) -> _Floats:
        """Weight for standardised features and targets about their mean."""
        return self.solve(self.system.targets - self.part.rows.T @ self.part.targets)

    @cached_property
    def left(self) -> _Floats:
        """Residuals of the part's targets under the regression."""
        if self.of_all is None:
            return np.asarray(self.part.targets - self.part.rows @ self.weight)
        return _solved(self.factor, self.part.targets - self.part.rows @ self.of_all[1])

    def squared_errors(self) -> _Floats:
        """Return the sum of squared residuals of each client's held-out examples."""
        errors = self.part.unexplained.copy()
        for client, rows in self.part.whose.items():
            errors[client] += (self.left[rows] ** 2).sum()
        return errors

    def solve(self, right: _Floats) -> _Floats:
        """Return the solution of the system without the held-out part, for the right-hand side ``right``."""
        if self.half is None or self.of_all is None:
            return _solved(self.factor, right)
        outer = self.of_all[0]
        below = torch.linalg.solve_triangular(outer, torch.from_numpy(right), upper=False)
        below += self.half @ torch.from_numpy(_solved(self.factor, (self.half.T @ below).numpy()))
        return np.asarray(torch.linalg.solve_triangular(outer.T, below, upper=True).numpy())


def _factor(matrix: Tensor) -> Tensor:
    factor: Tensor
    factor, wrong = torch.linalg.cholesky_ex(matrix)
    # If any element of a row is not finite, the row's diagonal element is not finite either.
    if int(wrong) or not bool(torch.isfinite(factor.diagonal()).all()):
        raise UpdateError("these are not the sums of examples: no regression fits them")
    return factor


def _solved(factor: Tensor, right: _Floats) -> _Floats:
    # This takes half of the time of torch.cholesky_solve, which copies the factor. The right-hand side is scaled,
    # because sums of targets may exceed the range of fp32.
    rounds = factor.dtype is torch.float32
    size = float(np.abs(right).max(initial=0.0)) or 1.0 if rounds else 1.0
    given = torch.from_numpy(right / size).to(factor.dtype)
    below = torch.linalg.solve_triangular(factor, given, upper=False)
    found = torch.linalg.solve_triangular(factor.T, below, upper=True).numpy()
    return np.asarray(size * found.astype(np.float64))
