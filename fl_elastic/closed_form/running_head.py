"""A linear head in closed form that is updated with each example, exactly and without a full solve.

It uses recursive least squares (Woodbury's identity for examples that arrive together): one example costs a pass or
two over D x D numbers, while a full solve costs D^3 / 3 multiplications.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.closed_form.folds import FOLDS
from fl_elastic.closed_form.head import ClosedFormHead, stretch
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.ridge import PENALTIES, least_from, nearest_penalty
from fl_elastic.closed_form.running_sums import RunningSums, add_product
from fl_elastic.errors import UpdateError

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
# Index of the penalty until `choose_penalty` is called.
_FIRST = nearest_penalty(1.0)
# With more new examples than this share of the number of features, a full solve takes no longer than an update.
_MANY = 0.25
# Number of examples after which a full solve removes accumulated rounding errors.
_LONG = 1000
# Lower bounds on the penalty, as shares of the largest product, that are tried until singular products can be
# factored.
_SINGULAR = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)


class RunningHead:
    """Minimises squared error plus a penalty over the examples in its sums, at each call of `layer`.

    The penalty matrix stays fixed until the examples' weight has doubled, or until the next full solve. Then it is
    set again from the number of examples and the variances of features, as if these were standardised.

    Parameters
    ----------
    sums : RunningSums
        Sums of a layer with a bias; they must be changed through this head only.

    Attributes
    ----------
    penalty : float
        Penalty as a share of the number of examples.

    Examples
    --------
    >>> head = RunningHead(RunningSums(1, 2))
    >>> for x in range(10):
    ...     head.add(np.array([[float(x)]]), np.array([int(x > 4)]))
    >>> layer = head.layer()
    >>> (layer.weight @ [[4.0, 5.0]] + layer.bias[:, None]).argmax(0).tolist()
    [0, 1]
    """

    def __init__(self, sums: RunningSums) -> None:
        self.sums = sums
        self._place = _FIRST
        # After a solve there is either the factor or, once new examples need it, the inverse.
        self._factor: Tensor | None = None
        self._inverse: _Floats | None = None
        self._weight: _Floats = np.zeros_like(sums.targets)
        self._pending: list[tuple[_Floats, _Floats]] = []
        self._solved_at, self._since = 0.0, 0

    @property
    def penalty(self) -> float:
        """The penalty, as a share of the number of examples; with the sums, it is all that has to be saved."""
        return float(PENALTIES[self._place])

    def add(self, features: NDArray[Any], outputs: _Ints, counts: _Floats | None = None) -> None:
        """Add examples; see `RunningSums.add`."""
        rows = self.sums.add(features, outputs, counts)
        if self._is_solved:
            self._pending.append(rows)

    def remove(self, features: NDArray[Any], outputs: _Ints, counts: _Floats | None = None) -> None:
        """Remove examples, see `RunningSums.remove`; the next `layer` does a full solve."""
        self.sums.remove(features, outputs, counts)
        self.renew()

    def relabel(
        self, features: NDArray[Any], was: _Ints, now: _Ints, counts: _Floats | None = None
    ) -> None:
        """Move examples from one class to another."""
        self.sums.remove(features, was, counts)
        self.sums.add(features, now, counts)
        self.renew()

    def grow(self, outputs: int) -> None:
        """Extend the sums to at least ``outputs`` classes; nothing changes for the others."""
        self.sums.grow(outputs)
        more = self.sums.targets.shape[1] - self._weight.shape[1]
        pad = ((0, 0), (0, more))
        self._weight = np.pad(self._weight, pad)
        self._pending = [(rows, np.pad(wanted, pad)) for rows, wanted in self._pending]

    def scale(self, share: float) -> None:
        """Multiply the weight of each example, and the penalty, by ``share``, which leaves the head unchanged."""
        self.sums.scale(share)
        self.renew()

    def renew(self) -> None:
        """Request a full solve for the next `layer`: the result then depends on sums and penalty only."""
        self._factor, self._inverse, self._pending = None, None, []

    def layer(self) -> ClosedFormHead:
        """Return the head for the examples that are in the sums now.

        Class scores are scaled up as in `closed_form_head`.

        Raises
        ------
        UpdateError
            If the sums cannot be those of examples.
        """
        self._settle()
        sums, weight = self.sums, self._weight
        bias = weight[-1] - sums.origin @ weight[:-1]
        # Relative to the origin, like the weight: the confidence of scores does not depend on the origin.
        total = HeadSums("", sums.products, sums.targets, sums.targets[-1], classes=True)
        factor = stretch(total, weight[:-1], weight[-1]) if sums.weight else 1.0
        return ClosedFormHead(
            weight=(factor * weight[:-1].T).astype(np.float32),
            bias=(factor * (bias - bias.mean())).astype(np.float32),
            penalty=self.penalty,
            error=float("nan"),
        )

    def choose_penalty(
        self, features: NDArray[Any], outputs: _Ints, counts: _Floats | None = None
    ) -> float:
        """Choose the penalty with the least error on held-out examples; return it.

        Some of the examples in the sums are left out exactly, in five parts in turn. The search descends from the
        present penalty; each candidate costs a full solve.

        Parameters
        ----------
        features, outputs, counts
            Examples that are in the sums; nothing is changed if there are fewer than five.
        """
        if len(features) >= FOLDS:
            rows, wanted = self.sums.rows(features), np.zeros((len(outputs), len(self._weight[0])))
            wanted[np.arange(len(outputs)), outputs] = 1.0
            roots = np.ones(len(rows)) if counts is None else np.sqrt(counts)
            rows, wanted = roots[:, None] * rows, roots[:, None] * wanted
            self._place, _ = least_from(
                self._place, lambda place: self._held_out_error(place, rows, wanted)
            )
            self.renew()
        return self.penalty

    def take_penalty(self, penalty: float) -> None:
        """Set the penalty to the nearest candidate."""
        self._place = nearest_penalty(penalty)
        self.renew()

    def restore(self, sums: RunningSums, penalty: float) -> None:
        """Restore saved sums and penalty; the next `layer` does a full solve."""
        self.sums, self._weight = sums, np.zeros_like(sums.targets)
        self.take_penalty(penalty)

    def _settle(self) -> None:
        """Update weight and inverse to the present sums."""
        count = sum(len(rows) for rows, _ in self._pending)
        if not self.sums.weight:
            self._weight = np.zeros_like(self.sums.targets)
            self.renew()
            return
        self._since += count
        stale = self.sums.weight >= 2 * self._solved_at or self._since > _LONG
        if not self._is_solved or stale or count > _MANY * len(self._weight):
            self._factor, self._weight = self._solved(self._place)
            self._inverse = None
            self._solved_at, self._since = self.sums.weight, 0
        elif self._pending:
            rows, wanted = (np.concatenate(each) for each in zip(*self._pending, strict=True))
            if self._inverse is None:
                assert self._factor is not None
                self._inverse = torch.cholesky_inverse(self._factor).numpy()
                self._factor = None
            moved = self._inverse @ rows.T
            among = np.eye(len(rows)) + rows @ moved
            gain = np.linalg.solve(among, moved.T).T
            self._weight += gain @ (wanted - rows @ self._weight)
            add_product(self._inverse, gain, moved.T, -1.0)
        self._pending = []

    @property
    def _is_solved(self) -> bool:
        return self._factor is not None or self._inverse is not None

    def _solved(self, place: int) -> tuple[Tensor, _Floats]:
        """Return the lower factor of products plus penalty, of shape (D + 1, D + 1), and the weight."""
        sums = self.sums
        # The constant is not penalised.
        penalty = np.append(PENALTIES[place] * sums.weight * sums.spread, 0.0)
        targets = torch.from_numpy(sums.targets)
        largest = np.diag(sums.products).max()
        for least in _SINGULAR:
            held = np.maximum(penalty, least * largest)
            matrix = torch.from_numpy(sums.products + np.diag(held))
            factor, wrong = torch.linalg.cholesky_ex(matrix)
            if not int(wrong):
                return factor, torch.cholesky_solve(targets, factor).numpy()
        raise UpdateError(
            "the sums of a head in closed form are not those of examples: they hold numbers that are not finite, "
            "or examples were removed that were not in them"
        )

    def _held_out_error(self, place: int, rows: _Floats, wanted: _Floats) -> float:
        """Return the squared error on these rows, each part predicted by the head without it."""
        factor, weight = self._solved(place)
        left, error = wanted - rows @ weight, 0.0
        half = torch.linalg.solve_triangular(factor, torch.from_numpy(rows.T), upper=False).numpy()
        for part in range(FOLDS):
            own = half[:, part::FOLDS]
            among = np.eye(own.shape[1]) - own.T @ own
            error += float((np.linalg.solve(among, left[part::FOLDS]) ** 2).sum())
        return error
