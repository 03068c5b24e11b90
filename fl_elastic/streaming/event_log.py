"""Append-only log of what came after the learner's state was saved; a killed process loses none of it."""

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

__all__ = ["Event", "EventLog"]

_HEAD = struct.Struct("<III")


@dataclass(frozen=True, eq=False)
class Event:
    """Something that happened to a learner.

    Parameters
    ----------
    number : int
        How many there were until then, itself among them.
    facts : mapping
        What JSON can hold of it.
    x : array or None
        The samples, if there were any.
    """

    number: int
    facts: Mapping[str, Any]
    x: NDArray[Any] | None = None


class EventLog:
    """A file to which events are added, each whole or not at all, and forgotten once a saved state knows them.

    Parameters
    ----------
    path : Path
        Made, with its folder, when the first one is added.
    most : int
        Bytes beyond which none is added.

    Attributes
    ----------
    size : int
        Bytes that it takes now.

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
        """Return all events, and cut off what a killed process has left half; none where nothing can be read."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return []
        found, self.size = [], 0
        while (one := _event(data, self.size)) is not None:
            event, self.size = one
            found.append(event)
        if self.size < len(data):
            self._cut(self.size)
        return found

    def add(self, event: Event) -> bool:
        """Write an event; return whether the disk took it, it is as if it had never been tried if not.

        It is out of reach of whoever kills this process, and not yet of a power cut: that waits for the next save.
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
        """Take back the event that was added last."""
        self.size -= len(_bytes(event))
        self._cut(self.size)

    def clear(self) -> None:
        """Forget all: a saved state knows them. One that could not be forgotten is passed over when it is read."""
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
    """Return the event at a place, and where the next one begins; None where there is no whole one."""
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
