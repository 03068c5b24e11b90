"""When to adapt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fl_elastic.devices.power import power_supply
from fl_elastic.errors import StreamError

__all__ = [
    "AllOf",
    "AnyOf",
    "EverySamples",
    "Moment",
    "OnDrift",
    "OnMains",
    "Trigger",
]


@dataclass(frozen=True)
class Moment:
    """What a trigger may look at; all state there is, and kept by whoever asks.

    Parameters
    ----------
    samples : int
        Labelled samples since the last adaptation.
    since_drift : int or None
        Labelled samples since a drift that nothing was done about yet; None if there is none.
    """

    samples: int
    since_drift: int | None = None


class Trigger(ABC):
    """A condition; two are joined by ``&`` and ``|``.

    Examples
    --------
    >>> trigger = EverySamples(100) & OnMains() | OnDrift()
    >>> trigger.due(Moment(samples=3))
    False
    >>> trigger.due(Moment(samples=3, since_drift=40))
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
class OnMains(Trigger):
    """Not while the device lives on its battery; one that does not say where its power comes from has none."""

    def due(self, moment: Moment) -> bool:
        """Return whether power comes from outside."""
        return power_supply().on_mains is not False


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
