"""Drift detectors: they watch the model's errors, one sample after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import StreamError
from fl_elastic.registry import Factories
from fl_elastic.streaming.adwin import AdaptiveWindow

__all__ = ["DRIFT_DETECTORS", "DriftDetector", "DriftMemory"]


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
