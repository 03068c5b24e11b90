"""Head sums to which examples are added and from which they are removed one by one, as in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.ridge import varies
from fl_elastic.errors import UpdateError

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
# Below this weight no example is left, and the sums hold only rounding errors.
_NOBODY = 1e-9
# A mean is a rounding error if it is a smaller share than this of the numbers from whose difference it is computed.
_ROUNDED = 1e-12


@dataclass(frozen=True, eq=False)
class KeptSums:
    """State of `RunningSums`.

    Parameters
    ----------
    origin : array, shape (D,)
        As in `RunningSums`.
    products : array, shape ((D + 1) (D + 2) / 2,)
        Lower half of the symmetric products, row by row.
    targets : array, shape (D + 1, C)
        As in `RunningSums`.
    """

    origin: _Floats
    products: _Floats
    targets: _Floats

    def __post_init__(self) -> None:
        rows = len(self.origin) + 1
        shapes = self.origin.shape, self.products.shape, self.targets.shape[:1]
        if shapes != ((rows - 1,), (rows * (rows + 1) // 2,), (rows,)) or self.targets.ndim != 2:
            raise UpdateError(f"sums of shapes {shapes} do not fit each other")
        if not all(
            np.isfinite(array).all() for array in (self.origin, self.products, self.targets)
        ):
            raise UpdateError("a sum is not finite")


class RunningSums:
    """Sums over examples of outer products of features, and of features with their class, in double precision.

    Removing an example subtracts its products, which leaves the sums of the other examples, up to rounding.
    Features are summed relative to an origin, the mean of the first examples, so that large numbers that differ
    little, such as times, keep their differences.

    Parameters
    ----------
    features, outputs : int
        Inputs and outputs of the linear layer, D and C.

    Attributes
    ----------
    origin : array, shape (D,)
        Subtracted from features before they are summed.
    products : array, shape (D + 1, D + 1)
        Sum of the outer products of each example's features with themselves, with a constant 1 appended. The lower
        half is used; the upper one may differ from it in the last bit.
    targets : array, shape (D + 1, C)
        Sum of the features, with a constant 1 appended, of the examples of each class.

    Examples
    --------
    >>> sums = RunningSums(2, 3)
    >>> x, y = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.array([0, 2, 2])
    >>> _ = sums.add(x, y), sums.remove(x[1:2], y[1:2])
    >>> sums.weight, sums.head_sums("weight").targets[-1].tolist()
    (2.0, [1.0, 0.0, 1.0])
    """

    def __init__(self, features: int, outputs: int) -> None:
        self.origin: _Floats = np.zeros(features)
        self.products: _Floats = np.zeros((features + 1,) * 2)
        self.targets: _Floats = np.zeros((features + 1, outputs))

    @classmethod
    def of(cls, sums: HeadSums) -> RunningSums:
        """Return running sums that continue given head sums."""
        found = cls(sums.products.shape[0] - 1, sums.targets.shape[1])
        found.origin = sums.products[-1, :-1] / sums.products[-1, -1]
        moved = np.eye(len(sums.products))
        moved[:-1, -1] = -found.origin
        found.products, found.targets = moved @ sums.products @ moved.T, moved @ sums.targets
        return found

    @property
    def weight(self) -> float:
        """Total weight of the examples."""
        return float(self.products[-1, -1])

    @property
    def mean(self) -> _Floats:
        """Mean of each feature, shape (D,)."""
        return self.origin + self.products[-1, :-1] / max(self.weight, _NOBODY)

    @property
    def spread(self) -> _Floats:
        """Variance of each feature, shape (D,); a constant feature gets the largest variance instead.

        A penalty proportional to these treats all features as if they were standardised.
        """
        spread = self._variance
        most = float(spread.max(initial=0.0)) or 1.0
        return np.where(self._constant, most, spread)

    @property
    def _variance(self) -> _Floats:
        weight = max(self.weight, _NOBODY)
        mean = self.products[-1, :-1] / weight
        return np.maximum(np.diag(self.products)[:-1] / weight - mean**2, 0.0)

    @property
    def _size(self) -> _Floats:
        """Size of the numbers from whose difference each feature's mean is computed, which bounds its precision."""
        mean = self.products[-1, :-1] / max(self.weight, _NOBODY)
        return np.maximum(np.abs(self.origin), np.abs(mean))

    @property
    def _constant(self) -> NDArray[np.bool_]:
        return ~varies(np.sqrt(self._variance), self._size)

    def rows(self, features: NDArray[Any]) -> _Floats:
        """Return features, shape (N, D), as they are summed: relative to the origin, with a constant 1 appended."""
        rows = np.ones((len(features), len(self.origin) + 1))
        rows[:, :-1] = np.asarray(features, np.float64) - self.origin
        return rows

    def add(
        self, features: NDArray[Any], outputs: _Ints, counts: _Floats | None = None
    ) -> tuple[_Floats, _Floats]:
        """Add examples; return their rows and targets, each multiplied by the root of the example's weight.

        Parameters
        ----------
        features : array, shape (N, D)
            Features, all finite.
        outputs : array of int, shape (N,)
            Their classes.
        counts : array, shape (N,), optional
            Weight of each example; by default 1.
        """
        if not self.weight and len(features):
            self.origin = np.asarray(features, np.float64).mean(axis=0)
        return self._change(features, outputs, counts, 1.0)

    def remove(
        self, features: NDArray[Any], outputs: _Ints, counts: _Floats | None = None
    ) -> tuple[_Floats, _Floats]:
        """Remove examples that were added with the same features, classes and weights; see `add`."""
        size = np.sqrt(np.maximum(np.diag(self.products)[:-1], 0.0))
        rows = self._change(features, outputs, counts, -1.0)
        if self.weight <= _NOBODY:
            self.products[:], self.targets[:] = 0.0, 0.0
            return rows
        # If a feature varied only in removed examples, the rest of its squares is a rounding error, by which no
        # head may divide.
        mean = self.products[-1, :-1] / self.weight
        left = np.abs(np.diag(self.products)[:-1] - mean**2 * self.weight)
        rounded = np.flatnonzero(~varies(np.sqrt(left), size))
        mean[np.abs(mean) * np.sqrt(self.weight) <= _ROUNDED * size] = 0.0
        make_constant(self.products, self.targets, rounded, mean)
        return rows

    def grow(self, outputs: int) -> None:
        """Extend the sums to at least ``outputs`` classes; no earlier example belongs to a new one."""
        more = outputs - self.targets.shape[1]
        if more > 0:
            self.targets = np.hstack([self.targets, np.zeros((len(self.targets), more))])

    def scale(self, share: float) -> None:
        """Multiply the weight of each example by ``share``."""
        self.products *= share
        self.targets *= share

    def head_sums(self, weight: str, outputs: Sequence[int] | None = None) -> HeadSums:
        """Return the sums in the form that is sent: relative to zero, and over a whole number of examples.

        Parameters
        ----------
        weight : str
            Name of the layer's weight.
        outputs : sequence of int, optional
            Classes in the wanted order, -1 for one without examples; by default all.

        Raises
        ------
        UpdateError
            If the weight is less than one example.
        """
        whole = round(self.weight) if abs(self.weight - round(self.weight)) < 1e-6 else 0
        whole = whole or int(self.weight)
        if whole < 1:
            raise UpdateError("there are no sums to send: no example is left")
        share = whole / self.weight
        moved = np.eye(len(self.products))
        moved[:-1, -1] = self.origin
        products = np.tril(self.products)
        products = share * (moved @ (products + np.tril(products, -1).T) @ moved.T)
        targets = share * (moved @ self.targets)
        products[-1, -1] = whole
        mean = np.where(np.abs(self.mean) > _ROUNDED * self._size, self.mean, 0.0)
        make_constant(products, targets, np.flatnonzero(self._constant), mean)
        if outputs is not None:
            empty = np.zeros((len(targets), 1))
            targets = np.hstack([targets, empty])[:, list(outputs)]
        return HeadSums(weight, (products + products.T) / 2, targets, targets[-1].copy(), True)

    def to_state(self) -> KeptSums:
        """Return the state to save."""
        half = self.products[np.tril_indices(len(self.products))]
        return KeptSums(self.origin.copy(), half, self.targets.copy())

    @classmethod
    def of_state(cls, state: KeptSums) -> RunningSums:
        """Return the sums from their saved state."""
        sums = cls(len(state.targets) - 1, state.targets.shape[1])
        sums.origin, sums.targets = state.origin.copy(), state.targets.copy()
        rows, columns = np.tril_indices(len(state.targets))
        sums.products[rows, columns] = sums.products[columns, rows] = state.products
        return sums

    def _change(
        self, features: NDArray[Any], outputs: _Ints, counts: _Floats | None, sign: float
    ) -> tuple[_Floats, _Floats]:
        rows = self.rows(features)
        wanted = np.zeros((len(rows), self.targets.shape[1]))
        wanted[np.arange(len(rows)), outputs] = 1.0
        if counts is not None:
            roots = np.sqrt(counts)[:, None]
            rows, wanted = roots * rows, roots * wanted
        add_product(self.products, rows.T, rows, sign)
        add_product(self.targets, rows.T, wanted, sign)
        return rows, wanted


def make_constant(
    products: _Floats, targets: _Floats, features: NDArray[np.intp], mean: _Floats
) -> None:
    """Change sums in place to those of examples in which these features are constant and equal their mean."""
    for feature in features:
        products[-1, feature] = mean[feature] * products[-1, -1]
        products[feature, :] = mean[feature] * products[-1, :]
        products[:, feature] = products[feature, :]
        targets[feature] = mean[feature] * targets[-1]


def add_product(to: _Floats, left: _Floats, right: _Floats, sign: float) -> None:
    """Add or subtract a product of two matrices in place, in one pass over the result."""
    torch.from_numpy(to).addmm_(torch.from_numpy(left), torch.from_numpy(right), alpha=sign)
