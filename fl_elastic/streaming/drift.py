"""Drift detectors, which observe the errors of a model sample by sample."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.registry import Factories

# A detector that was given twice this many errors is made again from this many of the newest.
_REMEMBERED = 2000
_DELTA = 0.002
# When more buckets have one size, the two oldest are merged.
_MOST_BUCKETS = 5
# Least numbers of a part and of a window to be compared.
_LEAST_PART, _LEAST = 5, 10


class DriftDetector(ABC):
    """Watches the errors of a model, sample by sample.

    `fl_elastic.streaming.prequential` passes 1 for a wrong prediction and 0 for a right one.
    """

    @abstractmethod
    def update(self, error: float) -> bool:
        """Add the next error; return whether errors have increased.

        The answer must depend only on the errors given since the detector was made.
        """


DRIFT_DETECTORS: Factories[DriftDetector] = Factories("drift detector")
"""Drift detectors by name."""


class DriftMemory:
    """A drift detector that starts again after each drift, and survives a restart without a difference.

    Its saved state is the list of errors that it was given, so that no object of a library has to be stored; after
    a restart the detector is given them again. To bound that list, the detector is regularly made again from the
    newest errors. Changes slower than these errors cover are then harder to detect.

    Parameters
    ----------
    make : callable
        Makes the detector.

    Examples
    --------
    >>> memory = DriftMemory(NoDetector)
    >>> [memory.update(error) for error in (0.0, 1.0, 1.0)], memory.errors.tolist()
    ([False, False, False], [0.0, 1.0, 1.0])
    """

    def __init__(self, make: Callable[[], DriftDetector]) -> None:
        self._make = make
        self._detector = make()
        self._errors: list[float] = []

    @property
    def errors(self) -> NDArray[np.float64]:
        """The errors that the detector was given: all that a restart needs."""
        return np.array(self._errors, np.float64)

    def update(self, error: float) -> bool:
        """Add the next error; return whether there is a drift."""
        drift = self._detector.update(error)
        self._errors.append(error)
        if drift:
            self.restore([])
        elif len(self._errors) >= 2 * _REMEMBERED:
            self.restore(self._errors[-_REMEMBERED:])
        return drift

    def restore(self, errors: ArrayLike) -> None:
        """Start from the errors before a restart, without reporting the drifts in them."""
        self._detector = self._make()
        self._errors = np.asarray(errors, np.float64).tolist()
        for error in self._errors:
            self._detector.update(error)


@DRIFT_DETECTORS.register("none")
class NoDetector(DriftDetector):
    """Never reports a drift."""

    def update(self, error: float) -> bool:
        """Return False."""
        del error
        return False


@DRIFT_DETECTORS.register("adwin")
class Adwin(DriftDetector):
    """ADWIN (Bifet and Gavaldà, SDM 2007), updated with every error.

    ADWIN also detects when errors decrease, as after an adaptation; that is not reported as a drift.
    """

    def __init__(self) -> None:
        self._window = AdaptiveWindow()

    def update(self, error: float) -> bool:
        """Return whether the window was cut and its newer part has more errors."""
        before = self._window.mean
        return self._window.add(error) and self._window.mean > before


@dataclass
class _Bucket:
    """Sum of some numbers, and of their squared distances from their mean."""

    total: float
    spread: float


@dataclass
class AdaptiveWindow:
    """The newest numbers of a stream, in buckets of 1, 2, 4, ... numbers (Bifet and Gavaldà, SDM 2007).

    When the means of an older and a newer part differ by more than chance allows, the older one is dropped.

    Attributes
    ----------
    width : int
        Numbers in the window.
    total : float
        Sum of the numbers in the window.

    Examples
    --------
    >>> window = AdaptiveWindow()
    >>> cuts = [number for number in range(400) if window.add(float(number >= 200))]
    >>> cuts[0], window.width < 220, window.mean > 0.9
    (212, True, True)
    """

    width: int = 0
    total: float = 0.0
    _spread: float = 0.0
    # Buckets by size; in each row the oldest is first.
    _rows: list[list[_Bucket]] = field(default_factory=lambda: [[]])

    @property
    def mean(self) -> float:
        """Mean of the numbers in the window; 0 if it is empty."""
        return self.total / self.width if self.width else 0.0

    def add(self, number: float) -> bool:
        """Add a number; return whether an older part was dropped."""
        if self.width:
            self._spread += self.width * (number - self.mean) ** 2 / (self.width + 1)
        self.width += 1
        self.total += number
        self._rows[0].append(_Bucket(number, 0.0))
        self._merge()
        return self._shrunk()

    def _merge(self) -> None:
        for place, row in enumerate(self._rows):
            if len(row) <= _MOST_BUCKETS:
                return
            if place + 1 == len(self._rows):
                self._rows.append([])
            first, second, size = row.pop(0), row.pop(0), 2**place
            apart = size * size * (first.total / size - second.total / size) ** 2 / (2 * size)
            self._rows[place + 1].append(
                _Bucket(first.total + second.total, first.spread + second.spread + apart)
            )

    def _shrunk(self) -> bool:
        cut = False
        while self.width > _LEAST and self._has_changed():
            self._drop_oldest()
            cut = True
        return cut

    def _has_changed(self) -> bool:
        """Return whether two parts of the window differ by more than chance allows."""
        old, old_total = 0, 0.0
        for place in reversed(range(len(self._rows))):
            for bucket in self._rows[place]:
                old, old_total = old + 2**place, old_total + bucket.total
                new = self.width - old
                if new < _LEAST_PART:
                    return False
                if old >= _LEAST_PART and self._differ(old, old_total, new):
                    return True
        return False

    def _differ(self, old: int, old_total: float, new: int) -> bool:
        difference = abs(old_total / old - (self.total - old_total) / new)
        chance = math.log(2 * math.log(self.width) / _DELTA)
        size = 1 / (old - _LEAST_PART + 1) + 1 / (new - _LEAST_PART + 1)
        # Rounding may make it negative.
        variance = max(self._spread, 0.0) / self.width
        return difference > math.sqrt(2 * size * variance * chance) + 2 / 3 * chance * size

    def _drop_oldest(self) -> None:
        size = 2 ** (len(self._rows) - 1)
        bucket = self._rows[-1].pop(0)
        self.width -= size
        self.total -= bucket.total
        mean, apart = self.mean, bucket.total / size
        self._spread -= bucket.spread + size * self.width * (apart - mean) ** 2 / (
            size + self.width
        )
        if not self._rows[-1]:
            self._rows.pop()
