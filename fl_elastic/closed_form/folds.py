"""Sums over folds of a client's examples: left out of the total, a fold measures a head on held-out examples.

A fold contains no example itself: its rows are a factor of the sums, and any examples with the same sums have the
same factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

FOLDS = 5
"""Number of folds into which examples are divided for holding out."""

_Floats = NDArray[np.float64]
# Smaller squares than this share of the largest one are rounding errors.
_ROUNDED = 1e-13


@dataclass(frozen=True, eq=False)
class Fold:
    """Sums over examples that are held out together.

    Attributes
    ----------
    rows : array, shape (R, D + 1)
        The sum of their outer products equals that of the examples' features, with a constant 1 appended.
    targets : array, shape (R, C)
        Targets of each row: the sum of outer products of rows and targets equals that over the examples.
    squares : array, shape (C,)
        Sum of the examples' squared targets.

    Examples
    --------
    >>> fold = Fold.of(np.array([[1.0, 2.0], [3.0, 4.0]]), np.eye(2))
    >>> fold.num_examples, (fold.rows.T @ fold.targets).tolist()
    (2.0, [[1.0, 3.0], [2.0, 4.0], [1.0, 1.0]])
    """

    rows: _Floats
    targets: _Floats
    squares: _Floats

    @classmethod
    def of(cls, features: _Floats, targets: _Floats) -> Fold:
        """Return the sums over examples of these features, shape (M, D), and targets, shape (M, C)."""
        rows = np.hstack([features, np.ones((len(features), 1))])
        return cls(rows, targets, (targets**2).sum(axis=0))

    @classmethod
    def about_mean(
        cls,
        examples: int,
        mean: _Floats,
        goal: _Floats,
        squares: _Floats,
        rows: _Floats,
        targets: _Floats,
    ) -> Fold:
        """Return the fold with these parts (the inverse of `centred`); ``goal`` is the mean target."""
        whole = np.zeros((len(rows) + 1, len(mean) + 1))
        whole[0, :-1], whole[0, -1], whole[1:, :-1] = mean, 1.0, rows
        whole[0] *= np.sqrt(examples)
        return cls(whole, np.vstack([goal * np.sqrt(examples), targets]), squares)

    @cached_property
    def num_examples(self) -> float:
        """Number of examples; their total weight if they are weighted."""
        return float((self.rows[:, -1] ** 2).sum())

    @property
    def unexplained(self) -> float:
        """Sum of squared targets that no linear layer can explain, because there are fewer rows than examples."""
        return max(float(self.squares.sum() - (self.targets**2).sum()), 0.0)

    def centred(self) -> tuple[_Floats, _Floats, _Floats, _Floats]:
        """Return means of features and targets, and rows and targets about these means.

        There is at most one row per feature. The rows are the principal axes of the fold, with lengths that are its
        extents along them: they follow from the sums alone, and reveal nothing else about the examples. If several
        axes have equal lengths, as for examples at equal distances from each other, the sums do not determine their
        directions, and the rows may resemble examples.
        """
        constant, examples = self.rows[:, -1], self.num_examples
        mean = constant @ self.rows[:, :-1] / examples
        goal = constant @ self.targets / examples
        rows = self.rows[:, :-1] - np.outer(constant, mean)
        if len(rows) <= rows.shape[1]:
            turn = np.linalg.eigh(rows @ rows.T)[1]
        else:
            squares, axes = np.linalg.eigh(rows.T @ rows)
            wide = squares > _ROUNDED * squares[-1]
            turn = rows @ (axes[:, wide] / np.sqrt(squares[wide]))
        return mean, goal, turn.T @ rows, turn.T @ (self.targets - np.outer(constant, goal))

    def times(self, share: float) -> Fold:
        """Return the sums with each example weighted by ``share``."""
        root = np.sqrt(share)
        return Fold(root * self.rows, root * self.targets, share * self.squares)

    def __add__(self, other: Fold) -> Fold:
        """Return the sums of both."""
        return Fold(
            np.vstack([self.rows, other.rows]),
            np.vstack([self.targets, other.targets]),
            self.squares + other.squares,
        )
