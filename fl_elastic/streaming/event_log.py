"""Append-only log of events since the last saved state; a killed process loses none of them."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.state.files import private_file

_HEAD = struct.Struct("<III")


@dataclass(frozen=True, eq=False)
class Event:
    """One event of a learner: samples or a label that arrived.

    Parameters
    ----------
    number : int
        Number of events so far, including this one.
    facts : mapping
        What the event says, as JSON can hold it.
    x : array or None
        The samples, if the event has any.
    """

    number: int
    facts: Mapping[str, Any]
    x: NDArray[Any] | None = None


class EventLog:
    """A file of events; each is written whole or not at all, and removed once a saved state contains it.

    Parameters
    ----------
    path : Path
        The file; it and its folder are made for the first event.
    most : int
        Most bytes of the file; beyond, no event is added.

    Attributes
    ----------
    size : int
        Bytes of the file now.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> log = EventLog(Path(folder.name) / "events.log", most=2**20)
    >>> log.add(Event(1, {"y": [3]}, np.zeros((1, 2), np.float32))), log.add(Event(2, {"refused": ["no array"]}))
    (True, True)
    >>> [(each.number, dict(each.facts)) for each in log.read()]
    [(1, {'y': [3]}), (2, {'refused': ['no array']})]
    >>> log.clear(); log.read(), log.close(), folder.cleanup()
    ([], None, None)
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self._file: int | None = None
        self.size = 0

    def read(self) -> list[Event]:
        """Return all events and cut off an incomplete one of a killed process; none if the file cannot be read."""
        found, self.size, length = _events_in(self._path)
        if self.size < length:
            self._cut(self.size)
        return found

    def add(self, event: Event) -> bool:
        """Write an event; return whether the disk took it. If not, the log is unchanged.

        A kill of this process cannot lose the event; a power cut can, until the next save.
        """
        data = _bytes(event)
        if self.size + len(data) > self._most:
            return False
        try:
            if self._file is None:
                self._file = private_file(self._path, os.O_RDWR | os.O_APPEND)
            taken = os.write(self._file, data)
        except OSError:
            taken = 0
        if taken == len(data):
            self.size += taken
            return True
        self._cut(self.size)
        return False

    def drop_last(self, event: Event) -> None:
        """Remove the event that was added last."""
        self.size -= len(_bytes(event))
        self._cut(self.size)

    def clear(self) -> None:
        """Remove all events once a saved state contains them. Any that remain are skipped when they are read."""
        self.size = 0
        self._cut(0)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _cut(self, size: int) -> None:
        try:
            os.truncate(self._path if self._file is None else self._file, size)
        except OSError:
            return


def read_events(path: Path) -> list[Event]:
    """Return all whole events in a file that another process may be writing."""
    return _events_in(path)[0]


def _events_in(path: Path) -> tuple[list[Event], int, int]:
    """Return the whole events in a file, the bytes that they take, and those of the file."""
    try:
        data = path.read_bytes()
    except OSError:
        return [], 0, 0
    found, size = [], 0
    while (one := _event(data, size)) is not None:
        event, size = one
        found.append(event)
    return found, size, len(data)


def _bytes(event: Event) -> bytes:
    facts: dict[str, Any] = {"n": event.number, **event.facts}
    rows = b""
    if event.x is not None:
        facts["x"] = [event.x.dtype.str, *event.x.shape]
        rows = np.ascontiguousarray(event.x).tobytes()
    text = json.dumps(facts, separators=(",", ":")).encode()
    check = zlib.crc32(rows, zlib.crc32(text))
    return _HEAD.pack(len(text), len(rows), check) + text + rows


def _event(data: bytes, start: int) -> tuple[Event, int] | None:
    """Return the event that starts at a byte, and where the next one starts; None if no whole event is there."""
    if start + _HEAD.size > len(data):
        return None
    length, rows, check = _HEAD.unpack_from(data, start)
    middle, end = start + _HEAD.size + length, start + _HEAD.size + length + rows
    text, flat = data[start + _HEAD.size : middle], data[middle:end]
    if end > len(data) or zlib.crc32(flat, zlib.crc32(text)) != check:
        return None
    try:
        facts = json.loads(text)
        number, form = int(facts.pop("n")), facts.pop("x", None)
        x = None if form is None else np.ndarray(form[1:], np.dtype(form[0]), flat).copy()
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Event(number, facts, x), end
