"""When to adapt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from fl_elastic.devices.power import PowerSupply, power_supply
from fl_elastic.errors import StreamError

__all__ = [
    "AllOf",
    "AnyOf",
    "EverySamples",
    "EverySeconds",
    "Moment",
    "OnDrift",
    "OnMains",
    "Trigger",
    "WhenIdle",
]


@dataclass(frozen=True)
class Moment:
    """What a trigger may look at; all state there is, and kept by whoever asks.

    Parameters
    ----------
    samples : int
        Labelled samples since the last adaptation.
    seconds : float
        Time of the stream since then, or since its start.
    since_drift : int or None
        Labelled samples since a drift that nothing was done about yet; None if there is none.
    idle : float
        Seconds since the last sample.
    supply : callable
        Tells where the power comes from.
    """

    samples: int
    seconds: float
    since_drift: int | None = None
    idle: float = 0.0
    supply: Callable[[], PowerSupply] = power_supply


class Trigger(ABC):
    """A condition; two are joined by ``&`` and ``|``.

    Examples
    --------
    >>> trigger = EverySamples(100) & OnMains() | OnDrift()
    >>> trigger.due(Moment(samples=100, seconds=5.0, supply=lambda: PowerSupply(False, 0.8)))
    False
    >>> trigger.due(Moment(samples=3, seconds=5.0, since_drift=40))
    True
    """

    @abstractmethod
    def due(self, moment: Moment) -> bool:
        """Return whether to adapt now."""

    def __and__(self, other: Trigger) -> Trigger:
        return AllOf((self, other))

    def __or__(self, other: Trigger) -> Trigger:
        return AnyOf((self, other))


@dataclass(frozen=True)
class EverySamples(Trigger):
    """After so many labelled samples."""

    samples: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise StreamError(f"every {self.samples} samples means nothing: give at least 1")

    def due(self, moment: Moment) -> bool:
        """Return whether there are as many."""
        return moment.samples >= self.samples


@dataclass(frozen=True)
class EverySeconds(Trigger):
    """After so many seconds of the stream's own clock, if there is anything new."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise StreamError(f"every {self.seconds} seconds means nothing: give more than 0")

    def due(self, moment: Moment) -> bool:
        """Return whether the time has passed."""
        return moment.samples > 0 and moment.seconds >= self.seconds


@dataclass(frozen=True)
class OnDrift(Trigger):
    """After a drift, once there are so many labelled samples of the changed world."""

    after: int = 32

    def __post_init__(self) -> None:
        if self.after < 0:
            raise StreamError(f"{self.after} samples after a drift means nothing: give 0 or more")

    def due(self, moment: Moment) -> bool:
        """Return whether they are there."""
        return moment.since_drift is not None and moment.since_drift >= self.after


@dataclass(frozen=True)
class WhenIdle(Trigger):
    """When no sample has come for so many seconds and there is anything new; asked by `StreamLearner.tick`."""

    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise StreamError(f"idle for {self.seconds} seconds means nothing: give more than 0")

    def due(self, moment: Moment) -> bool:
        """Return whether the stream has been silent for as long."""
        return moment.samples > 0 and moment.idle >= self.seconds


@dataclass(frozen=True)
class OnMains(Trigger):
    """Not while the device lives on its battery; one that does not say where its power comes from has none."""

    def due(self, moment: Moment) -> bool:
        """Return whether power comes from outside."""
        return moment.supply().on_mains is not False


@dataclass(frozen=True)
class AllOf(Trigger):
    """When all of several conditions hold; put those first that are cheap to ask."""

    triggers: tuple[Trigger, ...]

    def due(self, moment: Moment) -> bool:
        """Return whether all hold."""
        return all(trigger.due(moment) for trigger in self.triggers)


@dataclass(frozen=True)
class AnyOf(Trigger):
    """When any of several conditions holds; never, if there are none."""

    triggers: tuple[Trigger, ...] = ()

    def due(self, moment: Moment) -> bool:
        """Return whether any holds."""
        return any(trigger.due(moment) for trigger in self.triggers)
