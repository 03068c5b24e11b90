"""The running sums of a model's tensors, in one array of doubles."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from fl_elastic.aggregation.rules import Amount, LinearRule
from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role

# Numbers per piece, such that its sum, one product and the numbers themselves fit into a core's own cache.
_PIECE = 16_000
# Number of updates that are collected before all of them are added in one pass.
_AT_ONCE = 4
# A client's steps are limited to this multiple of the median of its round, and to the median over it.
_FURTHEST = 10


class Addend(NamedTuple):
    """Numbers that are multiplied by a factor and added to the sum.

    Attributes
    ----------
    numbers : array, one-dimensional
        ``size`` of them, from ``start`` on, are added.
    start, to, size : int
        Where the numbers begin in ``numbers`` and in the sum, and how many they are.
    factor : float
        Their weight.
    """

    numbers: NDArray[Any]
    start: int
    to: int
    size: int
    factor: float


def joined(addends: Sequence[Addend]) -> Iterator[Addend]:
    """Join consecutive addends with the same factor, so that a whole model is added at once.

    Examples
    --------
    >>> numbers = np.arange(9.0)
    >>> pieces = [Addend(numbers, 0, 5, 2, 1.0), Addend(numbers, 2, 7, 3, 1.0), Addend(numbers, 5, 10, 4, 2.0)]
    >>> [(piece.start, piece.to, piece.size) for piece in joined(pieces)]
    [(0, 5, 5), (5, 10, 4)]
    """
    last: Addend | None = None
    for addend in addends:
        if last is None:
            last = addend
            continue
        numbers, start, to, size, factor = last
        follows = addend.start == start + size and addend.to == to + size
        if follows and addend.numbers is numbers and addend.factor == factor:
            last = Addend(numbers, start, to, size + addend.size, factor)
        else:
            yield last
            last = addend
    if last is not None:
        yield last


class FlatSum:
    """Sums of all tensors that are averaged, in the manifest's order, in double precision.

    In double precision the result does not depend on the order of replies, up to the final rounding. The sum has
    twice the bytes of an update, so a few updates are collected, and the sum is read and written only once for all
    of them. The system provides memory only for tensors to which numbers are added.

    Parameters
    ----------
    manifest : Manifest
        Manifest of the global model.

    Attributes
    ----------
    places : dict of str to int
        Position at which each tensor begins.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.places: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        size = 0
        for name, shape, role in zip(manifest.names, manifest.shapes, manifest.roles, strict=True):
            if role is not Role.COUNTER:
                self.places[name], self._shapes[name] = size, shape
                size += math.prod(shape)
        self._sum = np.zeros(size)
        self._waiting: list[Addend] = []
        self._updates = 0
        # Weak references, so that an update that is never added can be freed.
        self._lent: WeakValueDictionary[int, NDArray[np.float32]] = WeakValueDictionary()
        self._spare: list[NDArray[np.float32]] = []
        self._product = np.empty(min(_PIECE, size))

    def memory(self, size: int) -> NDArray[np.float32]:
        """Return an array for ``size`` numbers of one update; it is reused after `add` has added them.

        New memory would take as much time as reading the numbers, because the system clears it page by page.
        """
        array = self._spare.pop() if self._spare else np.empty(len(self._sum), np.float32)
        self._lent[id(array)] = array
        return array[:size]

    def add(self, addends: Iterable[Addend], *, waits: bool = False) -> None:
        """Add the numbers of one update, times their factors.

        Parameters
        ----------
        addends : iterable of Addend
            Addends of one update.
        waits : bool
            Whether the numbers stay unchanged until later updates arrive, so that they need not be added at once.
        """
        self._waiting += addends
        self._updates += 1
        if not waits or self._updates == _AT_ONCE:
            self._add_up()

    def _add_up(self) -> None:
        regions: dict[tuple[int, int], list[Addend]] = {}
        for addend in self._waiting:
            regions.setdefault((addend.to, addend.size), []).append(addend)
        self._waiting, self._updates = [], 0
        for (to, size), those in regions.items():
            self._add_region(to, size, those)
        for addend in chain.from_iterable(regions.values()):
            array = self._lent.pop(id(addend.numbers.base), None)
            if array is not None:
                self._spare.append(array)

    def _add_region(self, to: int, size: int, addends: Sequence[Addend]) -> None:
        for done in range(0, size, _PIECE):
            count = min(_PIECE, size - done)
            product, total = self._product[:count], self._sum[to + done : to + done + count]
            for addend in addends:
                begin = addend.start + done
                # Converting first and then multiplying is faster than doing both in one operation.
                np.copyto(product, addend.numbers[begin : begin + count])
                np.multiply(product, addend.factor, out=product)
                np.add(total, product, out=total)

    def of(self, name: str) -> NDArray[np.float64]:
        """Return the sum of one tensor; a view, not to be modified."""
        self._add_up()
        self._spare.clear()
        shape, start = self._shapes[name], self.places[name]
        return self._sum[start : start + math.prod(shape)].reshape(shape)


class TensorSum:
    r"""The weights with which the deltas of one tensor were summed, and the resulting mean.

    Parameters
    ----------
    normalise_steps : bool
        Whether deltas are divided by the client's local steps and multiplied by the weighted mean of the steps:
        FedNova (Wang et al., NeurIPS 2020) per tensor, :math:`\bar\tau \sum_i n_i \Delta_i / \tau_i / \sum_i n_i`.
        In this mean, each client's number of steps is limited to between a tenth of the median and ten times the
        median.
    """

    __slots__ = ("_clients", "_contributed", "_normalise", "_steps")

    def __init__(self, *, normalise_steps: bool = False) -> None:
        self._normalise = normalise_steps
        self._contributed: Amount = 0.0
        # Weight and number of clients, by their number of steps.
        self._steps: dict[int, Amount] = {}
        self._clients: dict[int, int] = {}

    def add(self, weight: float, steps: int, part: NDArray[np.bool_] | None) -> float:
        """Count one client's delta, and return the factor by which to multiply it in the sum.

        Parameters
        ----------
        weight : float
            Weight of the client.
        steps : int
            Number of its steps that trained the tensor.
        part : array of bool or None
            Mask of the trained elements; None for all.
        """
        share: Amount = weight if part is None else np.where(part, weight, 0.0)
        self._contributed = self._contributed + share
        if not self._normalise:
            return weight
        self._steps[steps] = self._steps.get(steps, 0.0) + share
        self._clients[steps] = self._clients.get(steps, 0) + 1
        return weight / steps

    def mean(
        self, summed: NDArray[np.float64], rule: LinearRule | None, total: float
    ) -> NDArray[np.float64]:
        """Return the merged delta; zero in elements that no client trained.

        Parameters
        ----------
        summed : array
            Sum of the deltas times their factors.
        rule : LinearRule or None
            Rule whose divisor is used; None for the mean over the contributors.
        total : float
            Weight of all clients.
        """
        contributed = self._contributed
        divisor = contributed if rule is None else rule.divisor(contributed, total)
        merged = summed / _one_for_zero(divisor)
        # numpy turns sums of zero-dimensional arrays into plain scalars.
        return np.asarray(merged * self.mean_steps)

    @property
    def mean_steps(self) -> Amount:
        """Weighted mean of the limited step counts, which multiplies deltas per step; 1 if not normalised."""
        if not self._normalise:
            return 1.0
        usual = statistics.median_low(Counter(self._clients).elements())
        total: Amount = 0.0
        for steps, share in self._steps.items():
            total = total + share * believed_steps(steps, usual)
        return total / _one_for_zero(self._contributed)


def believed_steps(steps: int, usual: float) -> float:
    """Return a client's number of steps, limited by the median ``usual`` of its round.

    >>> believed_steps(1_000_000, 8), believed_steps(5, 8)
    (80, 5)
    """
    return min(max(steps, usual / _FURTHEST), usual * _FURTHEST)


def _one_for_zero(amount: Amount) -> Amount:
    return np.where(amount > 0, amount, 1.0) if isinstance(amount, np.ndarray) else amount
