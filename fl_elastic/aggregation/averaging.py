"""Exponential moving average of the global model, which is evaluated and returned instead of the last model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import CheckpointError, SettingError

# The decay is at most r / (r + _WARM_UP) after round r, so that the first models lose their weight faster.
_WARM_UP = 10


@dataclass(frozen=True, eq=False)
class AverageState:
    """State of a `ModelAverage`: number of models, their mean, and the dtype of each tensor."""

    rounds: int
    mean: dict[str, NDArray[Any]]
    dtypes: dict[str, str]


class ModelAverage:
    r"""Exponential moving average of the global model, round by round.

    If clients differ, each round moves the global model towards those that took part. The mean over rounds is
    nearer to the common optimum than any single model (Polyak and Juditsky 1992; on the server of a federation,
    Caldarola et al. 2022). Clients continue from the newest model. On the server the mean takes the memory of one
    model and one pass over it per round; clients have no extra cost.

    The average after round r is :math:`d \bar w + (1 - d) w` with :math:`d = \min(decay, r / (r + 10))`, so that
    the first models do not affect it for long.

    Parameters
    ----------
    decay : float
        Between 0 and 1; the average extends over about 1 / (1 - decay) rounds.

    Attributes
    ----------
    rounds : int
        Number of models so far.

    Raises
    ------
    SettingError
        If the decay is not above 0 and below 1.

    Examples
    --------
    >>> average = ModelAverage(0.5)
    >>> for value in (0.0, 1.0):
    ...     average.add({"w": np.array([value], np.float32)})
    >>> round(float(average.weights()["w"][0]), 3)
    0.909
    """

    def __init__(self, decay: float = 0.9) -> None:
        if not 0 < decay < 1:
            raise SettingError(f"decay {decay} of the model average must lie between 0 and 1")
        self.decay = decay
        self.rounds = 0
        self._mean: dict[str, NDArray[Any]] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}

    def add(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Add the model of one more round, including the first; integer buffers are taken from the newest model."""
        keep = min(self.decay, self.rounds / (self.rounds + _WARM_UP))
        self.rounds += 1
        for name, value in weights.items():
            self._dtypes[name] = value.dtype
            if value.dtype.kind != "f":
                self._mean[name] = np.array(value)
            elif name not in self._mean:
                self._mean[name] = np.array(value, np.float64)
            elif self._mean[name].shape != value.shape:
                raise CheckpointError(
                    f"the mean of {name!r} has shape {self._mean[name].shape}, the model {value.shape}: "
                    "delete the checkpoints"
                )
            else:
                # A new array, so that an earlier state can be restored.
                self._mean[name] = np.asarray(keep * self._mean[name] + (1 - keep) * value)

    def begin_anew(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Restart the mean from this model, so that it does not depend on earlier models."""
        self.rounds, self._mean = 0, {}
        self.add(weights)

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the mean in the models' dtypes; empty before the first model."""
        return {name: mean.astype(self._dtypes[name]) for name, mean in self._mean.items()}

    def to_state(self) -> AverageState:
        """Return the state to be stored."""
        dtypes = {name: kind.name for name, kind in self._dtypes.items()}
        return AverageState(self.rounds, dict(self._mean), dtypes)

    def restore(self, state: AverageState) -> None:
        """Restore what `to_state` returned."""
        self.rounds, self._mean = state.rounds, dict(state.mean)
        self._dtypes = {name: np.dtype(kind) for name, kind in state.dtypes.items()}
