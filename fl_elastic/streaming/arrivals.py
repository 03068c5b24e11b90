"""Samples as they arrive together, under the names of their senders, what came of each, and how that is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StreamError
from fl_elastic.streaming.intake import checked_batch
from fl_elastic.streaming.observation import Observation
from fl_elastic.streaming.places import Place

__all__ = ["Arrivals", "Arrived", "SenderIds", "noted_arrivals"]


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Samples that are there together, as many labels, times and names, None for what was not given."""

    xs: Sequence[Any]
    ys: Sequence[Any]
    ts: Sequence[Any]
    names: Sequence[str | None]

    @classmethod
    def checked(cls, xs: Any, ys: Any, ts: Any, names: Sequence[str | None] | None) -> Arrivals:
        """Return them; StreamError if there are not as many of each."""
        samples, labels, times = checked_batch(xs, ys, ts)
        called = [None] * len(samples) if names is None else list(names)
        if len(called) != len(samples):
            raise StreamError(f"{len(samples)} samples and {len(called)} names: give as many")
        return cls(samples, labels, times, called)


@dataclass(frozen=True, eq=False)
class Arrived:
    """What came of one sample.

    Parameters
    ----------
    seen : Observation
        What is said of it.
    number : int
        Which it is; 0 if it was refused.
    x, label, t, name
        As it was taken in; None for one that was known already.
    """

    seen: Observation
    number: int = 0
    x: NDArray[Any] | None = None
    label: int | None = None
    t: float | None = None
    name: str | None = None

    def unkept(self) -> Arrived:
        """Return it as one that would not be known after a kill."""
        return replace(self, seen=replace(self.seen, sample_id=None))


def noted_arrivals(
    seen: Sequence[Arrived], place: Place | None
) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """Return what is to be written down of samples, and the samples; nothing where nothing has changed."""
    taken = [each for each in seen if each.x is not None]
    refused = [each.seen.refused for each in seen if each.seen.refused]
    facts: dict[str, Any] = {"refused": refused} if refused else {}
    if taken:
        facts |= {
            "number": taken[0].number,
            "y": [each.label for each in taken],
            "t": [each.t for each in taken],
            "names": [each.name for each in taken],
        }
    if facts and place is not None:
        facts["place"] = [place.source, place.at]
    return facts, np.stack([each.x for each in taken if each.x is not None]) if taken else None


class SenderIds:
    """The newest names that senders gave their samples: one that is sent again is known.

    Parameters
    ----------
    most : int
        Names that are kept.
    known : mapping of str to int
        Of an earlier life, oldest first.

    Examples
    --------
    >>> names = SenderIds(most=2)
    >>> for number, name in enumerate(["door-1", "door-2", "door-3"], start=1):
    ...     names.add(name, number)
    >>> names.number("door-1"), names.number("door-3"), names.to_facts()
    (None, 3, {'door-2': 2, 'door-3': 3})
    """

    def __init__(self, most: int, known: Mapping[str, int] | None = None) -> None:
        self._most = most
        self._known = dict(known or {})

    def add(self, name: str, number: int) -> None:
        """Remember which sample a name stands for."""
        self._known[name] = number
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def number(self, name: str) -> int | None:
        """Return which sample a name stands for; None if it is new, or forgotten."""
        return self._known.get(name)

    def to_facts(self) -> dict[str, int]:
        """Return it as JSON can hold it."""
        return dict(self._known)
