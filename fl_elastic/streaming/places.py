"""Where in its sources a learner stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MOST_PLACES", "Place", "with_place"]

MOST_PLACES = 16
"""Sources that are remembered; the one that was read last longest ago is forgotten."""


@dataclass(frozen=True)
class Place:
    """How far a source has been read once a sample is handled.

    Parameters
    ----------
    source : str
        Which.
    at : mapping
        What the source needs to go on from there; JSON can hold it.
    """

    source: str
    at: Mapping[str, Any]


def with_place(places: Mapping[str, Mapping[str, Any]], new: Place) -> dict[str, Mapping[str, Any]]:
    """Return places by source with one more.

    >>> with_place({"csv:a": {"offset": 3}, "csv:b": {"offset": 9}}, Place("csv:a", {"offset": 5}))
    {'csv:b': {'offset': 9}, 'csv:a': {'offset': 5}}
    """
    rest = {source: at for source, at in places.items() if source != new.source}
    return dict([*rest.items(), (new.source, new.at)][-MOST_PLACES:])
