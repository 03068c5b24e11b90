"""Choose the places that a head reads: those with the least error on held-out folds of a few clients' examples.

Ridge regression from several places side by side depends only on the sum of their kernels, the products of
examples' features with each other: one matrix per place. So a union of places costs as much as a single place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.closed_form.folds import FOLDS
from fl_elastic.closed_form.head import inner_mean
from fl_elastic.closed_form.ridge import (
    PENALTIES,
    least_from,
    nearest_penalty,
    precise_enough,
    varies,
)
from fl_elastic.errors import UpdateError
from fl_elastic.readout.place import Place, joined

EXAMPLES = 640
"""Number of examples, of all clients together, that suffices to choose places."""

_Floats = NDArray[np.float64]
# Index of the penalty from which the search for the best penalty starts.
_START = nearest_penalty(1.0)
# Share of the previous error by which a larger union must be better.
_GAIN = 0.005
# All places are ranked with one penalty. This many of the best are then ranked with their best penalties and tried
# in unions, of at most the second number of places.
_TRIED, _JOINED = 8, 4


@dataclass(frozen=True, eq=False)
class Sample:
    """Sample of examples by which places are ranked: features at each place, and targets.

    Rows need not be single examples: the rows of a fold may be multiplied by any rotation.

    Attributes
    ----------
    rows : dict of Place to array, shape (R, D)
        Features at each place.
    constant : array, shape (R,)
        Value of the constant feature in each row: 1 for an example, another number for a row of a rotated fold. The
        squares add up to the number of examples.
    targets : array, shape (R, C)
        Targets of each row.
    folds : array of int, shape (R,)
        Rows with the same number are held out together.
    clients : array of int, shape (R,)
        Client of each row.
    """

    rows: Mapping[Place, NDArray[np.floating]]
    constant: _Floats
    targets: _Floats
    folds: NDArray[np.int64]
    clients: NDArray[np.int64]

    @property
    def num_examples(self) -> float:
        """Number of examples that the rows represent."""
        return float((self.constant**2).sum())

    @classmethod
    def of(
        cls,
        rows: Mapping[Place, NDArray[np.floating]],
        targets: _Floats,
        folds: NDArray[np.int64],
    ) -> Sample:
        """Return a sample whose rows are examples.

        Parameters
        ----------
        rows : mapping of Place to array, shape (N, D)
            Features.
        targets : array, shape (N, C)
            One-hot classes, or the values to predict.
        folds : array of int, shape (N,)
            Examples with the same number are held out together.
        """
        whose = np.zeros(len(targets), np.int64)
        return cls(rows, np.ones(len(targets)), targets, folds, whose)

    @classmethod
    def together(cls, samples: Sequence[Sample]) -> Sample:
        """Return the samples of several clients as one; folds of different clients stay separate.

        Only places that all clients have are kept.
        """
        common = [
            place for place in samples[0].rows if all(place in other.rows for other in samples)
        ]
        if not common:
            raise UpdateError("the clients have no place in common")
        offset, folds = 0, []
        for sample in samples:
            folds.append(sample.folds + offset)
            offset += int(sample.folds.max(initial=-1)) + 1
        return cls(
            {place: np.concatenate([sample.rows[place] for sample in samples]) for place in common},
            np.concatenate([sample.constant for sample in samples]),
            np.concatenate([sample.targets for sample in samples]),
            np.concatenate(folds),
            np.repeat(np.arange(len(samples)), [len(sample.folds) for sample in samples]),
        )

    def times(self, weight: float) -> Sample:
        """Return the sample with each row weighted by ``weight``."""
        root = float(np.sqrt(weight))
        return Sample(
            {place: root * rows for place, rows in self.rows.items()},
            root * self.constant, root * self.targets, self.folds, self.clients,
        )  # fmt: skip


@dataclass(frozen=True)
class PlaceWorth:
    """Error of a head that reads from one place, or from several.

    Attributes
    ----------
    places : tuple of Place
        Places that are read side by side.
    features : int
        Features per example.
    error : float
        Mean squared error on held-out examples, relative to predicting the mean. With several clients, the highest
        and the lowest fifth of their errors do not count.
    penalty : float
        The penalty of least error, in the units of `fl_elastic.closed_form.head.ClosedFormHead`.
    """

    places: tuple[Place, ...]
    features: int
    error: float
    penalty: float

    @property
    def name(self) -> str:
        """Name of the places, joined by plus."""
        return joined(self.places)


@dataclass(frozen=True)
class Choice:
    """The best places, and the errors of the others.

    Attributes
    ----------
    best : PlaceWorth
        The chosen places.
    single : tuple of PlaceWorth
        Each place alone, the best one first.
    unions : tuple of PlaceWorth
        The best union of each size; places were added one by one.
    """

    best: PlaceWorth
    single: tuple[PlaceWorth, ...]
    unions: tuple[PlaceWorth, ...]


def choose_places(sample: Sample, *, most_features: int) -> Choice:
    """Return the places from which ridge regression has the least error on held-out examples.

    Starting from the best place, and from the best one with at most half of the features, places are added one by
    one, each time the one that reduces the error most, as long as the error falls enough and the bound of features
    is kept. Features are standardised.

    Parameters
    ----------
    sample : Sample
        Examples with features at every candidate.
    most_features : int
        Bound on the features per example, of all chosen places together.

    Raises
    ------
    UpdateError
        If no place has at most ``most_features`` features, or targets do not vary.

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

    # Cached, because each takes a hundredth of a second, and the searches for penalties and unions repeat some.
    errors: dict[tuple[frozenset[Place], int], float] = {}

    def worth(
        places: tuple[Place, ...],
        parts: Sequence[NDArray[np.float32]],
        near: int = _START,
        closely: bool = True,
    ) -> tuple[PlaceWorth, int]:
        whole = reduce(np.add, parts)

        def error_with(penalty: int) -> float:
            case = frozenset(places), penalty
            if case not in errors:
                errors[case] = task.error(whole, float(PENALTIES[penalty]))
            return errors[case]

        best, error = least_from(near, error_with) if closely else (near, error_with(near))
        features = sum(sample.rows[place].shape[1] for place in places)
        return PlaceWorth(places, features, error, float(PENALTIES[best])), best

    # Kernels of all places would take more memory than their features; only those of the best places are kept.
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

    # The best place alone may take nearly all allowed features and leave no room for others.
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
    """Centred targets, the rows of each held-out part, and the number of examples of each client."""

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
                "all examples have the same target, so that places cannot be compared: shuffle data that are "
                "sorted by class, or name the places"
            )
        numbers = np.unique(sample.folds)
        held = [
            np.flatnonzero(np.isin(sample.folds, numbers[part::FOLDS]))
            for part in range(min(FOLDS, len(numbers)))
        ]
        if len(held) < 2:
            raise UpdateError(
                "a place is chosen by its error on held-out examples, and all examples are equal or in one fold: "
                "give more examples that differ, or name the places"
            )
        clients = np.asarray(np.unique(sample.clients, return_inverse=True)[1], np.int64)
        of_clients = np.asarray(np.bincount(clients, weights=constant**2), np.float64)
        return cls(examples, constant, targets, held, clients, of_clients, variance)

    def kernel(self, rows: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return the products of standardised rows with each other."""
        mean = self.constant @ rows / self.examples
        centred = np.outer(self.constant, mean)
        np.subtract(rows, centred, out=centred)
        # fp32 is precise enough for standardised numbers, and takes half the time.
        scaled = centred.astype(np.float32)
        spread = np.sqrt(np.einsum("ij,ij->j", scaled, scaled) / self.examples)
        moves = varies(spread, mean)
        scaled = scaled[:, moves]
        scaled /= spread[moves].astype(np.float32)
        return np.asarray(scaled @ scaled.T, np.float32)

    def error(self, kernel: NDArray[np.float32], penalty: float) -> float:
        """Return the error on held-out parts with one penalty.

        With A the inverse of kernel plus penalty, the residual of part F under a head solved from the rest is
        inv(A_FF) (A y)_F. The constant is not penalised: kernel and targets are centred, so that the constant is an
        eigenvector, whose part of A is subtracted.
        """
        held = penalty * self.examples
        # Rounding changes the eigenvector little if its eigenvalue is as large as the others.
        large = float(np.trace(kernel)) / self.examples
        whole = kernel + np.outer(self.constant, large / self.examples * self.constant)
        whole = whole.astype(precise_enough(penalty), copy=False)
        whole[np.diag_indices(len(whole))] += held
        # Cholesky uses the symmetry, which halves the work of the inverse.
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(torch.from_numpy(whole))).numpy()
        free = self.constant / np.sqrt((held + large) * self.examples)
        weights = inverse @ self.targets.astype(inverse.dtype)
        squared = np.zeros(len(self.constant))
        for part in self.parts:
            within = inverse[np.ix_(part, part)] - np.outer(free[part], free[part])
            left = np.linalg.solve(within.astype(np.float64), weights[part].astype(np.float64))
            squared[part] = (left**2).sum(axis=1)
        errors = np.bincount(self.clients, weights=squared) / self.held
        return inner_mean(errors, self.held) / self.variance
