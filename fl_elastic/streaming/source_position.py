"""How far a learner has read each of its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_SOURCES = 16
"""Most sources that are remembered; the one read longest ago is forgotten first."""


@dataclass(frozen=True)
class SourcePosition:
    """How far a source has been read, once a sample is handled.

    Parameters
    ----------
    source : str
        Name of the source.
    at : mapping
        What the source needs in order to continue from there, as JSON can hold it.
    """

    source: str
    at: Mapping[str, Any]


def with_position(
    positions: Mapping[str, Mapping[str, Any]], new: SourcePosition
) -> dict[str, Mapping[str, Any]]:
    """Return the positions by source with one added or updated.

    >>> with_position({"csv:a": {"offset": 3}, "csv:b": {"offset": 9}}, SourcePosition("csv:a", {"offset": 5}))
    {'csv:b': {'offset': 9}, 'csv:a': {'offset': 5}}
    """
    rest = {source: at for source, at in positions.items() if source != new.source}
    return dict([*rest.items(), (new.source, new.at)][-MOST_SOURCES:])
