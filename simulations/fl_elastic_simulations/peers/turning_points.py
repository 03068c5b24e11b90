"""When to go on with more bits: once the loss has levelled off.

Fu and others, "FracTrain: fractionally squeezing bit savings both temporally and spatially for efficient DNN
training", NeurIPS 2020: progressive fractional quantisation, with the constants of the published code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import RegistryError

__all__ = ["TurningPoints"]

_WINDOW, _NORMALISED_BY = 5, 10
_DECAYS = 2


class TurningPoints:
    """Goes from stage to stage, at rounds in which the loss has levelled off.

    A round is a turning point if the last five losses differ from the newest by at most ``eps`` of the usual loss,
    which is the mean of the first ten. ``eps`` then shrinks, after the first and the second turning point, and five
    more losses are waited for.

    Parameters
    ----------
    stages : int
        How many there are, at least one.
    eps, decay : float
        The published settings of the documented command.

    Raises
    ------
    RegistryError
        If there is no stage.

    Attributes
    ----------
    stage : int
        The present one, from 0.

    Examples
    --------
    >>> points = TurningPoints(3)
    >>> [points.observe(loss) for loss in (2.0, 1.0, 1.01, 1.0, 1.02, 1.0)], points.stage
    ([False, False, False, False, False, True], 1)
    """

    def __init__(self, stages: int, *, eps: float = 0.05, decay: float = 0.3) -> None:
        if stages < 1:
            raise RegistryError(f"{stages} stages of precision: there must be at least one")
        self.stages = stages
        self._eps, self._decay = eps, decay
        self.stage = self._turns = 0
        self._recent: list[float] = []
        self._first: list[float] = []

    def observe(self, loss: float) -> bool:
        """Take in a round's loss; return whether there is another stage from now on."""
        if not math.isfinite(loss) or self.stage == self.stages - 1:
            return False
        if len(self._first) < _NORMALISED_BY:
            self._first.append(loss)
        self._recent = [*self._recent, loss][-_WINDOW:]
        usual = abs(sum(self._first) / len(self._first))
        level = all(abs(each - loss) <= self._eps * usual for each in self._recent)
        if len(self._recent) < _WINDOW or not level:
            return False
        self.stage += 1
        self._turns += 1
        if self._turns <= _DECAYS:
            self._eps *= self._decay
        self._recent = []
        return True

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what must outlast a restart."""
        return {
            "state": np.array([self.stage, self._turns, self._eps]),
            "recent": np.array(self._recent),
            "first": np.array(self._first),
        }

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `to_arrays` gave."""
        stage, turns, eps = np.asarray(arrays["state"], np.float64).tolist()
        losses = [np.asarray(arrays[name], np.float64) for name in ("recent", "first")]
        possible = all(np.isfinite(each).all() for each in losses) and eps > 0
        if not (possible and 0 <= stage < self.stages and 0 <= turns <= stage):
            raise ValueError(f"stage {stage} of {self.stages} is none of this run")
        self.stage, self._turns, self._eps = int(stage), int(turns), eps
        self._recent = losses[0].tolist()[-_WINDOW:]
        self._first = losses[1].tolist()[:_NORMALISED_BY]
