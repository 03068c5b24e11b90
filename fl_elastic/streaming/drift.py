"""Drift detectors: they watch the errors of the model, sample by sample."""

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
    """Watches the error of each sample: 0 or 1, or a loss."""

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
    a restart they are given again. To bound that list, the detector is now and then made again from the newest
    errors; it then detects changes slower than these less well.

    Parameters
    ----------
    make : callable
        Makes the detector.
    remember : int
        Number of newest errors from which the detector is made again, each time it has had twice as many.

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
        """The errors that the detector was given: all that a restart needs."""
        return np.array(self._errors, np.float64)

    def update(self, error: float) -> bool:
        """Add the next error; return whether there is a drift."""
        drift = self._detector.update(error)
        self._errors.append(error)
        if drift:
            self.restore([])
        elif len(self._errors) >= 2 * self._remember:
            self.restore(self._errors[-self._remember :])
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
