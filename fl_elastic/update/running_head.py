"""A linear head in closed form that follows its sums: exact after each example, without solving anew for it.

Recursive least squares (Woodbury's identity for the examples that have come together): what one example costs is a
pass or two over D x D numbers, where to solve anew costs D^3 / 3 multiplications.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.errors import UpdateError
from fl_elastic.update.closed_form import ClosedFormHead, stretch
from fl_elastic.update.head_sums import HeadSums
from fl_elastic.update.ridge import PARTS, PENALTIES, least_from
from fl_elastic.update.running_sums import RunningSums, add_product

__all__ = ["RunningHead"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
# Of the penalties, the one that is taken before any is tried.
_FIRST = 8
# More examples than this share of the features: to solve anew takes no longer.
_MANY = 0.25
# Examples after which it is solved anew, so that roundings do not add up.
_LONG = 1000
# Where products are singular up to rounding, the penalty of each feature is at least such a share of the largest.
_SINGULAR = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)


class RunningHead:
    """Minimises squared error plus a penalty over the examples in its sums, whenever it is asked.

    The penalty is a matrix that stays as it is until the examples' weight has doubled, or the head is solved anew:
    then it follows the number of examples and the variances of features, as if these were standardised.

    Parameters
    ----------
    sums : RunningSums
        Changed through this head alone; their layer has a bias.

    Attributes
    ----------
    penalty : float
        In shares of the number of examples.

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
        # One of them where the weight was solved; the inverse is made once examples come that it is needed for.
        self._factor: Tensor | None = None
        self._inverse: _Floats | None = None
        self._weight: _Floats = np.zeros_like(sums.targets)
        self._pending: list[tuple[_Floats, _Floats]] = []
        self._solved_at, self._since = 0.0, 0

    @property
    def penalty(self) -> float:
        """The penalty, in shares of the number of examples."""
        return float(PENALTIES[self._place])

    def add(self, features: NDArray[Any], outputs: _Ints, counts: _Floats | None = None) -> None:
        """Add examples; see `RunningSums.add`."""
        rows = self.sums.add(features, outputs, counts)
        if self._is_solved:
            self._pending.append(rows)

    def remove(self, features: NDArray[Any], outputs: _Ints, counts: _Floats | None = None) -> None:
        """Take examples out again; see `RunningSums.remove`. It is solved anew then."""
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
        """Have at least so many classes; nothing changes for the others."""
        self.sums.grow(outputs)
        more = self.sums.targets.shape[1] - self._weight.shape[1]
        pad = ((0, 0), (0, more))
        self._weight = np.pad(self._weight, pad)
        self._pending = [(rows, np.pad(wanted, pad)) for rows, wanted in self._pending]

    def scale(self, share: float) -> None:
        """Let each example count so much of what it did, the penalty as well: the head stays the same."""
        self.sums.scale(share)
        self.renew()

    def renew(self) -> None:
        """Solve anew from the sums when it is asked next: what it is then depends on sums and penalty alone."""
        self._factor, self._inverse, self._pending = None, None, []

    def layer(self) -> ClosedFormHead:
        """Return the head for the examples that are in the sums now, stretched as that of `closed_form_head`.

        Raises
        ------
        UpdateError
            If the sums are those of no examples.
        """
        self._settle()
        sums, weight = self.sums, self._weight
        bias = weight[-1] - sums.origin @ weight[:-1]
        # From the origin, as the weight is: how sure scores are does not depend on where features are counted from.
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
        """Take the penalty with the least error on held-out examples; return it.

        Some of the examples in the sums are left out in turn, in five parts, exactly. From the present penalty it
        goes down the hill, and each one tried is as dear as to solve anew.

        Parameters
        ----------
        features, outputs, counts
            Of examples that are in the sums; nothing is changed where there are fewer than parts.
        """
        if len(features) >= PARTS:
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
        """Take the penalty next to this one of those that are tried."""
        self._place = int(np.abs(np.log(PENALTIES / penalty)).argmin())
        self.renew()

    @property
    def penalty_index(self) -> int:
        """Place of its penalty among those that are tried; with the sums, all that must be found again."""
        return self._place

    def restore(self, sums: RunningSums, penalty_index: int) -> None:
        """Take over what an earlier life has kept; it is solved anew."""
        self.sums, self._place = sums, penalty_index % len(PENALTIES)
        self._weight = np.zeros_like(sums.targets)
        self.renew()

    def _settle(self) -> None:
        """Let weight and inverse be those of the sums."""
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
        """Return the lower factor of products and penalty, of shape (D + 1, D + 1), and the weight."""
        sums = self.sums
        # The mean is not held down.
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
            "or examples were taken out that were not in them"
        )

    def _held_out_error(self, place: int, rows: _Floats, wanted: _Floats) -> float:
        """Return the squared error on rows, each found by the head without its part."""
        factor, weight = self._solved(place)
        left, error = wanted - rows @ weight, 0.0
        half = torch.linalg.solve_triangular(factor, torch.from_numpy(rows.T), upper=False).numpy()
        for part in range(PARTS):
            own = half[:, part::PARTS]
            among = np.eye(own.shape[1]) - own.T @ own
            error += float((np.linalg.solve(among, left[part::PARTS]) ** 2).sum())
        return error
