"""Notice that the world has changed: from the errors that the model makes, one sample after the other."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import StreamError
from fl_elastic.registry import Factories

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
    """ADWIN (Bifet and Gavaldà, SDM 2007), as river has it, asked at every error.

    It also notices when errors become fewer, as after an adaptation; that is no drift here.
    """

    def __init__(self) -> None:
        self._inner = _river("drift", "ADWIN")(clock=1)

    def update(self, error: float) -> bool:
        """Return whether the window was cut and its newer part has more errors."""
        before = self._inner.estimation
        self._inner.update(error)
        return bool(self._inner.drift_detected and self._inner.estimation > before)


@DRIFT_DETECTORS.register("page_hinkley")
class PageHinkley(DriftDetector):
    """Page's test for a rise of the mean, as river has it, tuned for errors of 0 and 1."""

    def __init__(self) -> None:
        self._inner = _river("drift", "PageHinkley")(threshold=20, delta=0.05, mode="up")

    def update(self, error: float) -> bool:
        """Return whether the mean has risen."""
        self._inner.update(error)
        return bool(self._inner.drift_detected)


class _Binary(DriftDetector):
    """A detector of river that takes right or wrong; a loss counts as wrong from a half."""

    _names: tuple[str, ...] = ()
    _settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self._inner = _river("drift.binary", *self._names)(**self._settings)

    def update(self, error: float) -> bool:
        """Return whether errors have become more."""
        self._inner.update(error >= 0.5)
        return bool(self._inner.drift_detected)


@DRIFT_DETECTORS.register("ddm")
class Ddm(_Binary):
    """DDM (Gama et al., SBIA 2004), as river has it, after a warm start long enough for few false alarms."""

    _names = ("DDM",)
    _settings = {"warm_start": 100}  # noqa: RUF012


@DRIFT_DETECTORS.register("hddm_a")
class HddmA(_Binary):
    """HDDM_A (Frías-Blanco et al., TKDE 2015), as river has it: needs no window, so hardly any memory."""

    # Its name has changed between releases.
    _names = ("HDDMA", "HDDM_A")


def _river(module: str, *names: str) -> Any:
    """Return river's class of the first of these names that there is."""
    try:
        found = importlib.import_module(f"river.{module}")
        return next(getattr(found, name) for name in names if hasattr(found, name))
    except (ImportError, StopIteration) as error:
        raise StreamError(
            f"the drift detector {names[0]} is river's, which does not have it here ({error!r}): "
            "install fl-elastic[stream], or choose the detector 'none'"
        ) from None
