"""Drift detectors: they watch the model's errors, one sample after the other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import StreamError
from fl_elastic.registry import Factories
from fl_elastic.streaming.adwin import AdaptiveWindow

__all__ = ["DRIFT_DETECTORS", "DriftDetector", "DriftMemory"]

# A loss from which on a sample counts as wrong.
_WRONG = 0.5


class DriftDetector(ABC):
    """Watches the error of each sample, 0 or 1, or a loss."""

    @abstractmethod
    def update(self, error: float) -> bool:
        """Take in the next error; return whether errors have become more since some sample.

        What it says depends on the errors given since it was made, and on nothing else.
        """


DRIFT_DETECTORS: Factories[DriftDetector] = Factories("drift detector")
"""Drift detectors by name."""


class DriftMemory:
    """A drift detector that begins anew after each drift, and goes on after a restart as if there had been none.

    The state of a detector is the errors that it was given, so that no object of a library need be stored: a
    restart gives them once more. So that they do not grow for ever, the detector is now and then made anew from
    the last ones; it then sees changes that are slower than these less well.

    Parameters
    ----------
    make : callable
        Makes the detector.
    remember : int
        Errors from which it is made anew, each time there are twice as many.

    Examples
    --------
    >>> memory = DriftMemory(NoDetector, remember=2)
    >>> [memory.update(error) for error in (0.0, 1.0, 1.0)], memory.errors.tolist()
    ([False, False, False], [0.0, 1.0, 1.0])
    """

    def __init__(self, make: Callable[[], DriftDetector], remember: int = 2000) -> None:
        if remember < 1:
            raise StreamError(f"remember {remember} must be at least 1 error")
        self._make, self._remember = make, remember
        self._detector = make()
        self._errors: list[float] = []

    @property
    def errors(self) -> NDArray[np.float64]:
        """The errors that the detector knows: all that a restart needs."""
        return np.array(self._errors, np.float64)

    def update(self, error: float) -> bool:
        """Take in the next error; return whether there is a drift."""
        drift = self._detector.update(error)
        self._errors.append(error)
        if drift:
            self.restore([])
        elif len(self._errors) >= 2 * self._remember:
            self.restore(self._errors[-self._remember :])
        return drift

    def restore(self, errors: ArrayLike) -> None:
        """Start from the errors of an earlier life, without a word about the drifts in them."""
        self._detector = self._make()
        self._errors = np.asarray(errors, np.float64).tolist()
        for error in self._errors:
            self._detector.update(error)


@DRIFT_DETECTORS.register("none")
class NoDetector(DriftDetector):
    """Never notices anything."""

    def update(self, error: float) -> bool:
        """Return False."""
        del error
        return False


@DRIFT_DETECTORS.register("adwin")
class Adwin(DriftDetector):
    """ADWIN (Bifet and Gavaldà, SDM 2007), asked at every error.

    It also notices when errors become fewer, as after an adaptation; that is no drift here.
    """

    def __init__(self) -> None:
        self._window = AdaptiveWindow()

    def update(self, error: float) -> bool:
        """Return whether the window was cut and its newer part has more errors."""
        before = self._window.mean
        return self._window.add(error) and self._window.mean > before


@DRIFT_DETECTORS.register("page_hinkley")
class PageHinkley(DriftDetector):
    """Page's test for a rise of the mean (Biometrika 1954), with constants for errors of 0 and 1."""

    _least, _slack, _fading, _threshold = 30, 0.05, 1 - 1e-4, 20.0

    def __init__(self) -> None:
        self._mean = _Mean()
        self._rise, self._lowest = 0.0, math.inf

    def update(self, error: float) -> bool:
        """Return whether the mean has risen."""
        self._mean.add(error)
        self._rise = self._fading * self._rise + error - self._mean.value - self._slack
        self._lowest = min(self._lowest, self._rise)
        return self._mean.count >= self._least and self._rise - self._lowest > self._threshold


@DRIFT_DETECTORS.register("ddm")
class Ddm(DriftDetector):
    """DDM (Gama et al., SBIA 2004), after a warm start long enough for few false alarms.

    A loss counts as wrong from a half.
    """

    _warm_start, _deviations = 100, 3.0

    def __init__(self) -> None:
        self._mean = _Mean()
        self._best, self._best_deviation = math.inf, 0.0

    def update(self, error: float) -> bool:
        """Return whether errors have become more."""
        self._mean.add(float(error >= _WRONG))
        share = self._mean.value
        deviation = math.sqrt(share * (1 - share) / self._mean.count)
        if self._mean.count <= self._warm_start:
            return False
        if share + deviation <= self._best + self._best_deviation:
            self._best, self._best_deviation = share, deviation
        return share + deviation > self._best + self._deviations * self._best_deviation


@DRIFT_DETECTORS.register("hddm_a")
class HddmA(DriftDetector):
    """HDDM_A (Frías-Blanco et al., TKDE 2015): needs no window, so hardly any memory.

    A loss counts as wrong from a half.
    """

    _confidence = 0.001

    def __init__(self) -> None:
        self._mean, self._lowest = _Mean(), _Mean()

    def update(self, error: float) -> bool:
        """Return whether errors have become more."""
        self._mean.add(float(error >= _WRONG))
        now, low = self._mean, self._lowest
        if not low.count or low.value + self._bound(low.count) >= now.value + self._bound(
            now.count
        ):
            self._lowest = low = replace(now)
        if low.count == now.count:
            return False
        share = (now.count - low.count) / low.count / now.count
        return now.value - low.value >= math.sqrt(share / 2 * math.log(2 / self._confidence))

    def _bound(self, count: int) -> float:
        """Return Hoeffding's bound of a mean of so many."""
        return math.sqrt(math.log(1 / self._confidence) / (2 * count))


@dataclass
class _Mean:
    """Of the numbers so far."""

    count: int = 0
    value: float = 0.0

    def add(self, number: float) -> None:
        self.count += 1
        self.value += (number - self.value) / self.count
