"""How much of the federation's model a device takes, and what it keeps to itself: one class per rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fl_elastic.errors import StreamError
from fl_elastic.registry import Factories
from fl_elastic.streaming.labelled_weights import Shares

__all__ = [
    "JOINING_RULES",
    "Interpolate",
    "JoiningRule",
    "Layout",
    "Measured",
    "Personal",
    "Replace",
]


@dataclass(frozen=True)
class Layout:
    """Which tensors are which.

    Parameters
    ----------
    head, statistics : tuple of str
        Names of the tensors of the head, and of the running statistics.
    norms : tuple of str
        Names of the parameters of the layers that keep statistics.
    """

    head: tuple[str, ...]
    statistics: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


class JoiningRule(ABC):
    """Decides what a device takes of the federation's model, and what it keeps to itself."""

    @abstractmethod
    def candidates(self, layout: Layout, *, drifted: bool) -> tuple[Shares, ...]:
        """Return the shares to try on the device's newest samples, the first one if there are no such samples.

        Parameters
        ----------
        layout : Layout
            Of the model.
        drifted : bool
            Whether the device has noticed a drift since the last round.
        """

    def personal(self, layout: Layout) -> tuple[str, ...]:
        """Return beginnings of the names of tensors that are neither taken nor sent."""
        del layout
        return ()


JOINING_RULES: Factories[JoiningRule] = Factories("joining rule")
"""Joining rules by name, each with its own settings."""


@JOINING_RULES.register("replace")
@dataclass(frozen=True)
class Replace(JoiningRule):
    """Takes the federation's model as it is, as federated averaging does."""

    def candidates(self, layout: Layout, *, drifted: bool) -> tuple[Shares, ...]:
        """Return all of it."""
        del layout, drifted
        return (Shares(1.0),)


@JOINING_RULES.register("interpolate")
@dataclass(frozen=True)
class Interpolate(JoiningRule):
    """Goes a part of the way from the device's model to the federation's.

    Parameters
    ----------
    share : float
        0 keeps the device's model, 1 takes the federation's.
    after_drift : float, optional
        Instead of it where the device has noticed a drift since the last round: less to lean on itself, more to
        lean on those who may know the changed world already.
    groups : mapping of str to float
        Shares of some tensors, by the beginning of their names; they hold with and without a drift.
    """

    share: float = 0.5
    after_drift: float | None = None
    groups: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Shares(self.share, self.groups)
        Shares(self.share if self.after_drift is None else self.after_drift)

    def candidates(self, layout: Layout, *, drifted: bool) -> tuple[Shares, ...]:
        """Return the one pair of shares that holds now."""
        del layout
        share = self.after_drift if drifted and self.after_drift is not None else self.share
        return (Shares(share, self.groups),)


@JOINING_RULES.register("personal")
@dataclass(frozen=True)
class Personal(JoiningRule):
    """Keeps some tensors to the device, neither taken nor sent, and joins the others by another rule.

    Parameters
    ----------
    names : tuple of str, optional
        Beginnings of names; None for the head, norms and their statistics.
    others : JoiningRule
        For the rest.
    """

    names: tuple[str, ...] | None = None
    others: JoiningRule = field(default_factory=Replace)

    def candidates(self, layout: Layout, *, drifted: bool) -> tuple[Shares, ...]:
        """Return the other rule's shares, with nothing of what is personal."""
        kept = dict.fromkeys(self.personal(layout), 0.0)
        tried = self.others.candidates(layout, drifted=drifted)
        # A longer name of the other rule must not open what is personal.
        return tuple(
            replace(each, named={n: s for n, s in each.named.items() if not _in(n, kept)} | kept)
            for each in tried
        )

    def personal(self, layout: Layout) -> tuple[str, ...]:
        """Return what was named, and what the other rule keeps."""
        names = (
            (*layout.head, *layout.norms, *layout.statistics) if self.names is None else self.names
        )
        return (*names, *self.others.personal(layout))


@JOINING_RULES.register("measured")
@dataclass(frozen=True)
class Measured(JoiningRule):
    """Tries several shares on the device's newest samples and takes the one that is right most often there.

    Parameters
    ----------
    shares : tuple of float
        To be tried; the first one where there are no samples.
    """

    shares: tuple[float, ...] = (0.5, 0.0, 0.25, 0.75, 1.0)

    def __post_init__(self) -> None:
        if not self.shares:
            raise StreamError("no share is given to be tried: give at least one")
        for share in self.shares:
            Shares(share)

    def candidates(self, layout: Layout, *, drifted: bool) -> tuple[Shares, ...]:
        """Return all of them."""
        del layout, drifted
        return tuple(Shares(share) for share in self.shares)


def _in(name: str, beginnings: Mapping[str, float]) -> bool:
    return any(name.startswith(each) for each in beginnings)
