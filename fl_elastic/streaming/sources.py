"""The interface of a stream's sources, and their registry: a CSV table, a folder of arrays, lines over a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_elastic.errors import StreamError
from fl_elastic.registry import Registry

POLL_SECONDS = 0.2
LONGEST_LINE = 16 * 2**20
"""Most bytes of a line; a longer one is refused and not kept in memory."""
TOO_LONG = f"line too long: more than {LONGEST_LINE} bytes"


def nobody(_: dict[str, Any]) -> None:
    """Ignore the result of a reading."""


@dataclass(frozen=True)
class SourceReading:
    """The next item from a source: a sample, a late label, or a pause.

    Parameters
    ----------
    x, y : object
        Sample and label as for `StreamLearner.observe`, unchecked, or `Unreadable` in place of ``x``. If ``x``,
        ``y`` and ``sample_id`` are all None, nothing has arrived recently.
    sample_id : int, str or None
        The sample to which the late label ``y`` belongs.
    answer : callable
        Called with the result of handling this reading.
    ends : bool
        Whether this is the last reading of a file; the file is moved away when the next reading is requested.
    position : mapping or None
        Position, as JSON values, from which the source continues after this reading; None if it cannot be read
        again.
    name : str or None
        The sender's name for the sample.
    """

    x: Any = None
    y: Any = None
    sample_id: int | str | None = None
    answer: Callable[[dict[str, Any]], None] = nobody
    ends: bool = False
    position: Mapping[str, Any] | None = None
    name: str | None = None

    @property
    def is_silence(self) -> bool:
        """Whether nothing has arrived."""
        return self.x is None and self.y is None and self.sample_id is None

    @property
    def awaits_answer(self) -> bool:
        """Whether it must be handled alone: a late label, or a sample whose sender waits for the answer."""
        return self.sample_id is not None or self.answer is not nobody


Source = Callable[[str, Mapping[str, Any], bool], Iterator[SourceReading]]
"""``source(where, after, follow)`` yields readings; ``after`` is the position of the last one read, or empty."""
SOURCES: Registry[Source] = Registry(
    "source",
    modules={
        "csv": "fl_elastic.streaming.csv_source",
        "dir": "fl_elastic.streaming.folder_source",
        "socket": "fl_elastic.streaming.socket_source",
    },
)


def open_source(
    spec: str, *, after: Mapping[str, Any] | None = None, follow: bool = False
) -> Iterator[SourceReading]:
    """Return the readings of a source.

    Parameters
    ----------
    spec : str
        ``csv:FILE``, ``dir:FOLDER`` or ``socket:HOST:PORT``.
    after : mapping, optional
        The `SourceReading.position` of the last reading that was handled before.
    follow : bool
        Whether to wait for more samples at the end of a table or folder; a socket always waits.

    Raises
    ------
    StreamError
        If there is no such source, or its content before the position has changed.
    """
    kind, where = _parts(spec)
    return SOURCES.get(kind)(where, after or {}, follow)


def source_name(spec: str) -> str:
    """Return the name under which a source is remembered; it does not depend on the working directory."""
    kind, where = _parts(spec)
    return f"{kind}:{Path(where).absolute()}" if Path(where).exists() else spec


def _parts(spec: str) -> tuple[str, str]:
    kind, colon, where = spec.partition(":")
    if not colon or not where:
        raise StreamError(f"source {spec!r} is not of the form {'|'.join(SOURCES.names())}:PLACE")
    return kind, where


MOST_SOURCES = 16
"""Most sources whose positions are kept; the one read longest ago is dropped first."""


@dataclass(frozen=True)
class SourcePosition:
    """Position of a source after a sample was handled.

    Parameters
    ----------
    source : str
        Name of the source.
    at : mapping
        Position from which the source can continue, as JSON values.
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
