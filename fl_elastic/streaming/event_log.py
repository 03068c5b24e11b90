"""Append-only log of events since the last saved state, and the record of which samples the store was given."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
        Content of the event, in a form that JSON can hold.
    x : array or None
        The samples, if the event has any.
    """

    number: int
    facts: Mapping[str, Any]
    x: NDArray[Any] | None = None


class EventLog:
    """A file of events; each is written whole or not at all, and removed once it is part of a saved state.

    Parameters
    ----------
    path : Path
        The file; it and its folder are made for the first event.
    most : int
        Largest size of the file; an event that would exceed it is not added.

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
        """Write an event; return whether it was written. If not, the log is unchanged.

        The event survives if this process is killed, but a power cut before the next save may lose it.
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


@dataclass(frozen=True)
class IngestedSamples:
    """The samples that the store was given, whether it kept them or not.

    Parameters
    ----------
    number : int
        Every sample up to this number was given, except those in ``beside``.
    beside : frozenset of int
        Samples up to ``number`` that were not given.
    events : int
        Number of the learner's events whose changes are in the store.

    Examples
    --------
    >>> given = IngestedSamples.of(12, [3, 11, 10, 4, 15], 20)
    >>> IngestedSamples.from_text(given.to_text()) == given
    True
    >>> [number for number in range(1, 16) if not given.has(number)]
    [3, 4, 10, 11, 13, 14, 15]
    >>> given.to_text()
    '[12,[[3,4],[10,11]],20]'
    """

    number: int = 0
    beside: frozenset[int] = frozenset()
    events: int = 0

    @classmethod
    def of(cls, number: int, beside: Iterable[int], events: int) -> IngestedSamples:
        """Return all samples up to ``number``, except those in ``beside``."""
        return cls(number, frozenset(each for each in beside if 0 < each <= number), events)

    def without(self, number: int) -> IngestedSamples:
        """Return a copy for a store from which this sample was withdrawn, so that it counts as not given."""
        return replace(self, beside=self.beside | {number})

    def has(self, number: int) -> bool:
        """Return whether the store was given a sample; False for a sample without a number."""
        return 0 < number <= self.number and number not in self.beside

    def to_text(self) -> str:
        """Return a JSON list: highest number given, [first, last] of each gap below it, number of events."""
        spans: list[list[int]] = []
        for each in sorted(self.beside):
            if spans and each == spans[-1][1] + 1:
                spans[-1][1] = each
            else:
                spans.append([each, each])
        return json.dumps([self.number, spans, self.events], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> IngestedSamples:
        """Read the text of `to_text`; any other text means that nothing was given."""
        try:
            number, spans, events = json.loads(text)
            beside = [each for first, last in spans for each in range(first, last + 1)]
            return cls(int(number), frozenset(beside), int(events))
        except (ValueError, TypeError, RecursionError):
            return cls()
