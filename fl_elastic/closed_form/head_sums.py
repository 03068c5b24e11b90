"""Sums over examples of the inputs and the targets of a model's last linear layer.

Sums of several clients add up to those of all, and the best linear head in the sense of least squares depends on
nothing else (`fl_elastic.closed_form.head`): the server sees no examples, and their distribution over clients does
not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from fl_elastic.closed_form.folds import Fold
from fl_elastic.errors import UpdateError

_Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Sums of products of the features and targets of one or more clients' examples.

    Sums over the examples of the folds are only computed when they are used. A client with few examples holds all
    of them out, sends their rows, and never computes a matrix of all products.

    Attributes
    ----------
    weight : str
        Name of the layer's weight, of shape (C, D), or (C, D, 1, 1) of a 1 x 1 convolution.
    rest_products, rest_targets, rest_squares : array
        `products`, `targets` and `squares` over only the examples that are in no fold.
    classes : bool
        Whether the targets are classes.
    folds : tuple of Fold
        Sums over disjoint sets of some of the examples: leaving a fold out shows the error of a head on examples
        that it was not solved from. Without folds, the error is measured on other clients' folds.
    """

    weight: str
    rest_products: _Floats
    rest_targets: _Floats
    rest_squares: _Floats
    classes: bool
    folds: tuple[Fold, ...] = ()

    @classmethod
    def of_folds(
        cls, weight: str, folds: Iterable[Fold], features: int, outputs: int, classes: bool
    ) -> HeadSums:
        """Return the sums over the examples of the folds only."""
        products, targets = np.zeros((features + 1,) * 2), np.zeros((features + 1, outputs))
        return cls(weight, products, targets, np.zeros(outputs), classes, tuple(folds))

    @classmethod
    def total(cls, sums: Sequence[HeadSums]) -> HeadSums:
        """Return the sums over all examples of several clients, without folds."""
        first = sums[0]
        products = np.zeros_like(first.rest_products)
        for each in sums:
            _refuse_unlike(first, each)
            if each.has_rest:
                products += each.rest_products
            if each.folds:
                rows = each._held_rows[0]
                products += rows.T @ rows
        targets = sum((each.targets for each in sums[1:]), first.targets)
        squares = sum((each.squares for each in sums[1:]), first.squares)
        return cls(first.weight, products, targets, squares, first.classes)

    @cached_property
    def products(self) -> _Floats:
        """Sum of the outer products of features with themselves, a constant 1 appended, shape (D + 1, D + 1)."""
        return self.without_folds().rest_products

    @cached_property
    def targets(self) -> _Floats:
        """Sum of the outer products of features and targets, shape (D + 1, C); a class's target is one-hot."""
        rows, goals = self._held_rows
        return self.rest_targets + rows.T @ goals if self.folds else self.rest_targets

    @cached_property
    def squares(self) -> _Floats:
        """Sum of squared targets, shape (C,)."""
        return sum((fold.squares for fold in self.folds), self.rest_squares)

    @cached_property
    def means(self) -> _Floats:
        """Means of the features, shape (D,)."""
        held = [fold.rows[:, -1] @ fold.rows for fold in self.folds]
        found = sum(held, self.rest_products[-1])
        return np.asarray(found[:-1] / found[-1])

    @cached_property
    def diagonal(self) -> _Floats:
        """Sum of squares of the features, a constant 1 appended, shape (D + 1,)."""
        rows = self._held_rows[0]
        return np.asarray(np.diag(self.rest_products) + np.einsum("ij,ij->j", rows, rows))

    @property
    def num_examples(self) -> int:
        """Number of examples that were summed."""
        return round(float(self.diagonal[-1]))

    def times_matrix(self, matrix: _Floats) -> _Floats:
        """Return `products` times a matrix of few columns, without computing `products`."""
        rows = self._held_rows[0]
        held = np.asarray(rows.T @ (rows @ matrix))
        return self.rest_products @ matrix + held if self.has_rest else held

    @cached_property
    def has_rest(self) -> bool:
        """Whether there are examples besides those of the folds."""
        return bool(self.rest_products.any())

    def __add__(self, other: HeadSums) -> HeadSums:
        """Return the sums of both; raise UpdateError if they are of different layers or kinds of target."""
        _refuse_unlike(self, other)
        return HeadSums(
            self.weight,
            self.rest_products + other.rest_products,
            self.rest_targets + other.rest_targets,
            self.rest_squares + other.rest_squares,
            self.classes,
            tuple(
                sum(rest, first)
                for first, *rest in (
                    [each for each in pair if each is not None]
                    for pair in zip_longest(self.folds, other.folds)
                )
            ),
        )

    def without_folds(self) -> HeadSums:
        """Return the same sums without folds."""
        return HeadSums.total([self]) if self.folds else self

    def with_folds(self, folds: Iterable[Fold]) -> HeadSums:
        """Return the same sums with these folds, whose examples they must include, instead of the present ones."""
        features, outputs = len(self.means), len(self.rest_squares)
        held = HeadSums.of_folds(self.weight, folds, features, outputs, self.classes)
        return HeadSums(
            self.weight,
            self.products - held.products,
            self.targets - held.targets,
            self.squares - held.squares,
            self.classes,
            held.folds,
        )

    def beside_folds(self) -> HeadSums:
        """Return the sums over the examples that are in no fold."""
        return replace(self, folds=())

    def of_outputs(self, count: int) -> HeadSums:
        """Return the sums for the first ``count`` outputs only."""
        folds = tuple(
            Fold(fold.rows, fold.targets[:, :count], fold.squares[:count]) for fold in self.folds
        )
        return replace(
            self,
            rest_targets=self.rest_targets[:, :count],
            rest_squares=self.rest_squares[:count],
            folds=folds,
        )

    def with_outputs(self, count: int) -> HeadSums:
        """Return the sums with at least ``count`` outputs; added ones have no example."""
        more = count - len(self.rest_squares)
        if more <= 0:
            return self
        beside = ((0, 0), (0, more))
        folds = tuple(
            Fold(fold.rows, np.pad(fold.targets, beside), np.pad(fold.squares, (0, more)))
            for fold in self.folds
        )
        return replace(
            self,
            rest_targets=np.pad(self.rest_targets, beside),
            rest_squares=np.pad(self.rest_squares, (0, more)),
            folds=folds,
        )

    def times(self, share: float) -> HeadSums:
        """Return the sums with each example weighted by ``share``."""
        if share == 1.0:
            return self
        return HeadSums(
            self.weight,
            share * self.rest_products,
            share * self.rest_targets,
            share * self.rest_squares,
            self.classes,
            tuple(fold.times(share) for fold in self.folds),
        )

    @cached_property
    def _held_rows(self) -> tuple[_Floats, _Floats]:
        """Rows and targets of all folds together."""
        rows = [np.zeros((0, len(self.rest_products))), *(fold.rows for fold in self.folds)]
        goals = [np.zeros((0, len(self.rest_squares))), *(fold.targets for fold in self.folds)]
        return np.vstack(rows), np.vstack(goals)


def _refuse_unlike(one: HeadSums, other: HeadSums) -> None:
    if (one.weight, one.classes) != (other.weight, other.classes):
        raise UpdateError(
            f"sums of {other.weight!r} for {_kind(other)} do not add to those of {one.weight!r} for {_kind(one)}"
        )


def _kind(sums: HeadSums) -> str:
    return "classes" if sums.classes else "numbers"
