"""Which places a head should read, from what a few clients' examples say: the least error on held-out folds.

Ridge regression from several places side by side depends on the sum of their kernels alone: products of examples'
features with each other, one matrix per place. So each union of places costs as much as one place does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.readout.place import Place, joined
from fl_elastic.update.closed_form import inner_mean
from fl_elastic.update.ridge import PARTS, PENALTIES, STILL, least_from

__all__ = ["EXAMPLES", "Choice", "PlaceWorth", "Sample", "choose_places"]

EXAMPLES = 640
"""From so many examples together it is seen what places are worth."""

_Floats = NDArray[np.float64]
# Where the best penalty is looked for first: 1.
_START = 8
# A union has to explain so much more of what the places before it leave.
_GAIN = 0.005
# With one penalty all places are ranked; of the best so many are looked at closely and tried in unions, and so
# many are joined.
_TRIED, _JOINED = 8, 4
# How much more a head's constant counts than what it is a constant beside: it is not penalised.
_FREE = 1e6


@dataclass(frozen=True, eq=False)
class Sample:
    """What ranks places: for some examples their features at each place, and their targets.

    Rows need not be examples: those of a fold may be mixed by any rotation.

    Attributes
    ----------
    rows : dict of Place to array, shape (R, D)
        Features at each place.
    constant : array, shape (R,)
        What each row has in place of the constant 1 of an example.
    targets : array, shape (R, C)
        Of each row.
    folds : array of int, shape (R,)
        Rows of equal number are held out together.
    clients : array of int, shape (R,)
        Whose each row is.
    """

    rows: Mapping[Place, NDArray[np.floating]]
    constant: _Floats
    targets: _Floats
    folds: NDArray[np.int64]
    clients: NDArray[np.int64]

    @property
    def num_examples(self) -> float:
        """How many examples the rows stand for."""
        return float((self.constant**2).sum())

    @classmethod
    def of(
        cls,
        rows: Mapping[Place, NDArray[np.floating]],
        targets: _Floats,
        folds: NDArray[np.int64],
    ) -> Sample:
        """Return the sample whose rows are examples.

        Parameters
        ----------
        rows : mapping of Place to array, shape (N, D)
            Features.
        targets : array, shape (N, C)
            A one at an example's class, or what is to be predicted.
        folds : array of int, shape (N,)
            Which examples are held out together.
        """
        whose = np.zeros(len(targets), np.int64)
        return cls(rows, np.ones(len(targets)), targets, folds, whose)

    @classmethod
    def together(cls, samples: Sequence[Sample]) -> Sample:
        """Return the examples of several clients as one sample; folds of different clients stay apart.

        Only places that all of them have are kept.
        """
        common = [
            place for place in samples[0].rows if all(place in other.rows for other in samples)
        ]
        if not common:
            raise UpdateError("the clients have no place in common")
        offset, folds = 0, []
        for each in samples:
            folds.append(each.folds + offset)
            offset += int(each.folds.max(initial=-1)) + 1
        return cls(
            {place: np.concatenate([each.rows[place] for each in samples]) for place in common},
            np.concatenate([each.constant for each in samples]),
            np.concatenate([each.targets for each in samples]),
            np.concatenate(folds),
            np.repeat(np.arange(len(samples)), [len(each.folds) for each in samples]),
        )

    def times(self, weight: float) -> Sample:
        """Return the sample with each row counting as so many."""
        root = float(np.sqrt(weight))
        return Sample(
            {place: root * rows for place, rows in self.rows.items()},
            root * self.constant, root * self.targets, self.folds, self.clients,
        )  # fmt: skip


@dataclass(frozen=True)
class PlaceWorth:
    """What a head would be worth that reads from one place, or from several.

    Attributes
    ----------
    places : tuple of Place
        Read side by side.
    features : int
        Of an example.
    error : float
        Mean squared error on held-out examples, over what the mean alone gives. Of many clients' errors the fifth
        at either end does not count.
    penalty : float
        With which it is least, as `fl_elastic.update.closed_form.ClosedFormHead` counts it.
    """

    places: tuple[Place, ...]
    features: int
    error: float
    penalty: float

    @property
    def name(self) -> str:
        """Name of the places."""
        return joined(self.places)


@dataclass(frozen=True)
class Choice:
    """Which places are best, and what the others would have been worth.

    Attributes
    ----------
    best : PlaceWorth
        The chosen places.
    single : tuple of PlaceWorth
        Each place alone, the best one first.
    unions : tuple of PlaceWorth
        The best union of each size, as places were added one by one.
    """

    best: PlaceWorth
    single: tuple[PlaceWorth, ...]
    unions: tuple[PlaceWorth, ...]


def choose_places(sample: Sample, *, most_features: int) -> Choice:
    """Return the places from which ridge regression has the least error on held-out examples.

    To the best place, and to the best one that takes at most half of the features, others are added one by one, the
    one that lessens the error most first, as long as that explains more of what is left and the features are not
    too many. Features are standardised.

    Parameters
    ----------
    sample : Sample
        Examples with features at every candidate.
    most_features : int
        Of an example, of all chosen places together.

    Raises
    ------
    UpdateError
        If no place has at most so many features, or targets do not vary.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> good, bad = rng.normal(size=(60, 3)), rng.normal(size=(60, 3))
    >>> rows = {Place.parse("good@flat"): good, Place.parse("bad@flat"): bad}
    >>> found = choose_places(Sample.of(rows, good @ rng.normal(size=(3, 2)), np.arange(60)), most_features=6)
    >>> found.best.name, [each.name for each in found.single]
    ('good@flat', ['good@flat', 'bad@flat'])
    """
    task = _Task.of(sample)
    candidates = [
        place for place, rows in sample.rows.items() if 0 < rows.shape[1] <= most_features
    ]
    if not candidates:
        raise UpdateError(
            f"no place has at most {most_features} features: allow more, or name the places to read"
        )

    def worth(
        places: tuple[Place, ...],
        parts: Iterable[NDArray[np.float32]],
        near: int = _START,
        closely: bool = True,
    ) -> tuple[PlaceWorth, int]:
        whole = task.whole(parts)
        best, error = (
            least_from(near, partial(task.error, whole))
            if closely
            else (near, task.error(whole, near))
        )
        features = sum(sample.rows[place].shape[1] for place in places)
        return PlaceWorth(places, features, error, float(PENALTIES[best])), best

    # Kernels of all places would take more memory than their features do: those of the best alone are kept.
    ranked = _by_error(
        worth((place,), [task.kernel(sample.rows[place])], closely=False) for place in candidates
    )
    kernels = {
        place: task.kernel(sample.rows[place])
        for each, _ in ranked[:_TRIED]
        for place in each.places
    }

    def joint(places: tuple[Place, ...], near: int, closely: bool = True) -> tuple[PlaceWorth, int]:
        return worth(places, [kernels[place] for place in places], near, closely)

    close = _by_error(joint((place,), _START) for place in kernels)
    alone = _by_error([*close, *ranked[_TRIED:]])

    def grown(start: PlaceWorth, penalty: int) -> list[PlaceWorth]:
        unions = [start]
        while len((best := unions[-1]).places) < _JOINED:
            rest = [
                (*best.places, each.places[0])
                for each, _ in close
                if each.places[0] not in best.places
                and best.features + each.features <= most_features
            ]
            if not rest:
                break
            first = min(
                (joint(places, penalty, closely=False)[0] for places in rest),
                key=lambda each: each.error,
            )
            found, penalty = joint(first.places, penalty)
            if found.error > (1 - _GAIN) * best.error:
                break
            unions.append(found)
        return unions

    # The best place alone may take nearly all of the features that are allowed, and leave no room for another.
    roomy = [each for each in close if 2 * each[0].features <= most_features]
    starts = [close[0], *(each for each in roomy[:1] if each is not close[0])]
    unions = min((grown(*each) for each in starts), key=lambda each: each[-1].error)
    best = unions[-1]
    order = {place: number for number, place in enumerate(sample.rows)}
    chosen = tuple(sorted(best.places, key=order.__getitem__))
    return Choice(
        PlaceWorth(chosen, best.features, best.error, best.penalty),
        tuple(each for each, _ in alone),
        tuple(unions),
    )


def _by_error(found: Iterable[tuple[PlaceWorth, int]]) -> list[tuple[PlaceWorth, int]]:
    return sorted(found, key=lambda each: each[0].error)


@dataclass(frozen=True, eq=False)
class _Task:
    """Targets about their mean, which rows are held out together, and how many examples each client has."""

    examples: float
    constant: _Floats
    targets: _Floats
    parts: list[NDArray[np.int64]]
    clients: NDArray[np.int64]
    held: _Floats
    variance: float

    @classmethod
    def of(cls, sample: Sample) -> _Task:
        constant = sample.constant
        examples = sample.num_examples
        goal = constant @ sample.targets / examples
        targets = sample.targets - np.outer(constant, goal)
        variance = float((targets**2).sum()) / examples
        if variance <= 0:
            raise UpdateError(
                "all examples have the same target: there is nothing to choose a place by"
            )
        numbers = np.unique(sample.folds)
        held = [
            np.flatnonzero(np.isin(sample.folds, numbers[part::PARTS]))
            for part in range(min(PARTS, len(numbers)))
        ]
        if len(held) < 2:
            raise UpdateError(
                "a place is chosen by examples that are held out: give two folds or more"
            )
        clients = np.asarray(np.unique(sample.clients, return_inverse=True)[1], np.int64)
        of_clients = np.asarray(np.bincount(clients, weights=constant**2), np.float64)
        return cls(examples, constant, targets, held, clients, of_clients, variance)

    def kernel(self, rows: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return the products of standardised rows with each other."""
        mean = self.constant @ rows / self.examples
        centred = np.outer(self.constant, mean)
        np.subtract(rows, centred, out=centred)
        # Standardised numbers lose nothing that matters in fp32, and take half the time.
        scaled = centred.astype(np.float32)
        spread = np.sqrt(np.einsum("ij,ij->j", scaled, scaled) / self.examples)
        moves = spread > STILL * max(float(spread.max(initial=0.0)), STILL)
        scaled = scaled[:, moves]
        scaled /= spread[moves].astype(np.float32)
        return np.asarray(scaled @ scaled.T, np.float32)

    def whole(self, kernels: Iterable[NDArray[np.float32]]) -> _Floats:
        """Return the sum of these kernels and the constant's: the kernel of all their features side by side."""
        whole = _FREE * np.outer(self.constant, self.constant)
        for kernel in kernels:
            whole += kernel
        return np.asarray(whole)

    def error(self, whole: _Floats, penalty: int) -> float:
        """Return the error on held-out rows with the penalty of this number."""
        return self._error(whole, float(PENALTIES[penalty]))

    def _error(self, kernel: _Floats, penalty: float) -> float:
        """Return the error on held-out parts with one penalty.

        With A the inverse of kernel plus penalty, a head from the rest leaves inv(A_FF) (A y)_F of a part F.
        """
        whole = torch.from_numpy(kernel.copy())
        whole.diagonal().add_(penalty * self.examples)
        # Half the work of an inverse that does not know that the matrix is symmetric.
        inverse: _Floats = torch.cholesky_inverse(torch.linalg.cholesky(whole)).numpy()
        weights = inverse @ self.targets
        squared = np.zeros(len(self.constant))
        for part in self.parts:
            left = np.linalg.solve(inverse[np.ix_(part, part)], weights[part])
            squared[part] = (left**2).sum(axis=1)
        errors = np.bincount(self.clients, weights=squared) / self.held
        return inner_mean(errors, self.held) / self.variance
