"""Server optimisers that do not move tensors that no client trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import CheckpointError, SettingError, UpdateError
from fl_elastic.registry import Factories

_Array = NDArray[Any]
_Weights = dict[str, _Array]


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """State of a `ServerOptimizer`.

    Parameters
    ----------
    moments : dict of str to array
        Moments, each under the key ``kind/name``, where ``name`` is the tensor's.
    counts : dict of str to int
        Number of steps of each tensor.
    """

    moments: dict[str, NDArray[np.float64]]
    counts: dict[str, int]


class ServerOptimizer(ABC):
    """Treats the merged change of a tensor as a pseudo-gradient, and takes a step along it.

    It is lazy: a tensor that no client trained keeps its value, its moments and its own count of steps. Otherwise
    stale moments would move it.

    Parameters
    ----------
    rate : float, optional
        Server learning rate.

    Attributes
    ----------
    default_rate : float
        Default learning rate.
    relative : bool
        Whether a step is a multiple of the clients' changes, so that with a rate above 1 the model moves further
        than the clients' models.
    """

    default_rate: ClassVar[float] = 1.0
    relative: ClassVar[bool] = True

    def __init__(self, rate: float | None = None) -> None:
        self.rate = self.default_rate if rate is None else rate
        if not 0 < self.rate < float("inf"):
            raise SettingError(f"server learning rate {self.rate} is not a positive number")
        self._moments: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, int] = {}

    def step(
        self, base: Mapping[str, _Array], merged: Mapping[str, _Array], touched: Collection[str]
    ) -> _Weights:
        """Return the new weights; if this raises an error, the optimiser's state is unchanged.

        Parameters
        ----------
        base, merged : dict of str to ndarray
            The global model before the round, and after the clients' updates.
        touched : collection of str
            Tensors that were trained; the others are returned as in ``merged``.

        Raises
        ------
        UpdateError
            If a weight would leave the range of its type.
        CheckpointError
            If state restored from a checkpoint is of another model.
        """
        moments, counts = dict(self._moments), dict(self._counts)
        try:
            return self.moved(base, merged, touched)
        except UpdateError:
            self._moments, self._counts = moments, counts
            raise
        except ValueError as error:
            raise CheckpointError(
                f"the state of the server's optimiser does not fit the model ({error}): delete the checkpoints"
            ) from None

    def moved(
        self, base: Mapping[str, _Array], merged: Mapping[str, _Array], touched: Collection[str]
    ) -> _Weights:
        """Return the new weights, one tensor at a time; kept arrays may be replaced but not modified."""
        new: _Weights = {}
        for name, old in base.items():
            if name not in touched:
                new[name] = np.array(merged[name])
                continue
            count = self._counts[name] = self._counts.get(name, 0) + 1
            change = np.asarray(merged[name], np.float64) - np.asarray(old, np.float64)
            moved = np.asarray(old, np.float64) + self.rate * self.direction(name, change, count)
            if moved.shape != old.shape:
                raise ValueError(f"a moment of {name!r} has shape {moved.shape}, not {old.shape}")
            with np.errstate(over="ignore"):
                new[name] = np.asarray(np.asarray(moved).astype(old.dtype))
            if not np.isfinite(new[name]).all():
                raise UpdateError(
                    f"the server's step takes {name!r} beyond the range of {old.dtype}"
                )
        return new

    @abstractmethod
    def direction(self, name: str, change: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """Return the direction of the step, given the merged change of the clients.

        Parameters
        ----------
        name : str
            Name of the tensor, under which `moment` keeps moments.
        change : array
            Merged minus base.
        count : int
            Number of rounds in which the tensor was trained, including this one.
        """

    def moment(
        self, kind: str, name: str, keep: float, value: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the moving average of ``value`` after this step, and keep it."""
        old = self._moments.get(f"{kind}/{name}")
        old = np.zeros_like(value) if old is None else old
        self._moments[f"{kind}/{name}"] = new = np.asarray(keep * old + (1 - keep) * value)
        return new

    def to_state(self) -> OptimizerState:
        """Return the state to be stored."""
        # numpy turns results of zero-dimensional arrays into plain scalars.
        moments = {name: np.asarray(moment) for name, moment in self._moments.items()}
        return OptimizerState(moments, dict(self._counts))

    def restore(self, state: OptimizerState) -> None:
        """Restore what `to_state` returned."""
        self._moments, self._counts = dict(state.moments), dict(state.counts)


SERVER_OPTIMIZERS: Factories[ServerOptimizer] = Factories(
    "server optimizer", modules={"agreement": "fl_elastic.aggregation.agreement"}
)
"""Registry of server optimisers by name; each is made with a rate, or with its default rate."""


@SERVER_OPTIMIZERS.register("sgd")
class Sgd(ServerOptimizer):
    """Steps along the clients' change; with rate 1 the result is the merged model."""

    def direction(self, name: str, change: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """Return the change."""
        return change


@SERVER_OPTIMIZERS.register("momentum")
class Momentum(ServerOptimizer):
    r"""FedAvgM (Hsu et al., 2019): :math:`v = 0.9 v + \Delta`, per tensor."""

    def direction(self, name: str, change: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """Return the velocity."""
        key = f"velocity/{name}"
        velocity = 0.9 * self._moments.get(key, np.zeros_like(change)) + change
        self._moments[key] = new = np.asarray(velocity)
        return new


class _Adaptive(ServerOptimizer):
    r"""Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), beta 0.9 and 0.99, tau 0.001."""

    default_rate = 0.01
    relative = False
    first, second, tau = 0.9, 0.99, 1e-3

    def direction(self, name: str, change: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """Return the mean change over the root of its mean square."""
        mean = self.moment("mean", name, self.first, change)
        square = self.squares(name, change)
        return np.asarray(self.correction(count) * mean / (np.sqrt(square) + self.tau))

    def correction(self, count: int) -> float:
        """Return the bias correction for moments that start at zero."""
        del count
        return 1.0

    @abstractmethod
    def squares(self, name: str, change: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the running mean square."""


@SERVER_OPTIMIZERS.register("adam")
class Adam(_Adaptive):
    """FedAdam, lazy; if every tensor is trained in every round it equals Flower's."""

    def squares(self, name: str, change: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the moving average of the squares."""
        return self.moment("square", name, self.second, change**2)

    def correction(self, count: int) -> float:
        """Return Adam's correction; as in Flower's FedAdam, the first step already counts as the second."""
        return float(np.sqrt(1 - self.second ** (count + 1)) / (1 - self.first ** (count + 1)))


@SERVER_OPTIMIZERS.register("yogi")
class Yogi(_Adaptive):
    """FedYogi, lazy: the mean square changes additively, by the sign of its error, so that it does not jump."""

    def squares(self, name: str, change: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the running mean square, moved towards the new square by a fixed share of that square."""
        key = f"square/{name}"
        old = self._moments.get(key, np.zeros_like(change))
        squared = change**2
        moved = old - (1 - self.second) * squared * np.sign(old - squared)
        self._moments[key] = new = np.asarray(moved)
        return new
