"""Sources of a stream: a CSV table, a folder of arrays, or lines over a socket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_elastic.errors import StreamError
from fl_elastic.streaming import folder_source, socket_source, table_source
from fl_elastic.streaming.reading import SOURCES, Reading

__all__ = ["SOURCES", "Reading", "open_source", "source_name"]

# Importing these modules registers their sources.
_OWN = (folder_source, socket_source, table_source)


def open_source(
    spec: str, *, after: Mapping[str, Any] | None = None, follow: bool = False
) -> Iterator[Reading]:
    """Return the readings of a source.

    Parameters
    ----------
    spec : str
        ``csv:FILE``, ``dir:FOLDER`` or ``socket:HOST:PORT``.
    after : mapping, optional
        The `Reading.place` of the last reading that was handled before.
    follow : bool
        Whether to wait for more at the end of a table or folder; a socket always waits.

    Raises
    ------
    StreamError
        If there is no such source, or its content before the place has changed.
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
