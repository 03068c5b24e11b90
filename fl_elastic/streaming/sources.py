"""Where a stream comes from: a table, a folder of arrays, or lines over a socket."""

from __future__ import annotations

import csv
import json
import math
import selectors
import socket
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_elastic.errors import StreamError
from fl_elastic.registry import Registry

__all__ = ["Reading", "open_source", "register_source", "sources"]

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 1.0
_DONE = "done"
_LONGEST_LINE = 16 * 2**20


def _nobody(_: dict[str, Any]) -> None:
    """Hear nothing of what came of a reading."""


@dataclass(frozen=True)
class Reading:
    """What a source gives next.

    Parameters
    ----------
    x, y, t : object
        As `StreamLearner.observe` takes them, unchecked; with neither x nor y nothing has come for a moment.
    sample_id : int or None
        The sample that ``y`` is a late label of.
    answer : callable
        Is told what came of it.
    ends : bool
        Whether it is the last of a file, which is put away once a further reading is asked for.
    """

    x: Any = None
    y: Any = None
    t: Any = None
    sample_id: int | None = None
    answer: Callable[[dict[str, Any]], None] = _nobody
    ends: bool = False

    @property
    def is_silence(self) -> bool:
        """Whether nothing has come."""
        return self.x is None and self.y is None

    @property
    def awaits_answer(self) -> bool:
        """Whether somebody waits for what comes of it before the next one comes."""
        return self.sample_id is not None or self.answer is not _nobody


Source = Callable[[str, int, bool], Iterator[Reading]]
"""``(place, skip, follow)`` to readings; ``skip`` readings were handled in an earlier life."""

_REGISTRY: Registry[Source] = Registry("source")
register_source = _REGISTRY.register


def sources() -> list[str]:
    """Return the kinds of sources there are."""
    return _REGISTRY.names()


def open_source(spec: str, *, skip: int = 0, follow: bool = False) -> Iterator[Reading]:
    """Return the readings of a source.

    Parameters
    ----------
    spec : str
        ``csv:FILE``, ``dir:FOLDER`` or ``socket:HOST:PORT``.
    skip : int
        Readings that were handled before, of a table.
    follow : bool
        Whether to wait for more at the end of a table or folder; a socket always waits.

    Raises
    ------
    StreamError
        If there is no such source.
    """
    kind, colon, place = spec.partition(":")
    if not colon or not place:
        raise StreamError(f"source {spec!r} is not of the form {'|'.join(sources())}:PLACE")
    return _REGISTRY.get(kind)(place, skip, follow)


@register_source("csv")
def table(place: str, skip: int, follow: bool) -> Iterator[Reading]:
    """Yield the rows of a CSV file with a header.

    The column ``label`` (or else the last one) is the label, empty for none; ``time`` the time, if there is such a
    column; all others are the sample. What cannot be read as numbers is handed on for the learner to refuse.
    """
    path = Path(place)
    if not path.is_file():
        raise StreamError(f"there is no table {path}")
    return _rows(path, skip, follow)


def _rows(path: Path, skip: int, follow: bool) -> Iterator[Reading]:
    with open(path, newline="", encoding="utf-8", errors="replace") as stream:
        lines = _lines(stream, follow)
        header = next(csv.reader([next(lines, "") or ""]), [])
        names = [name.strip().lower() for name in header]
        label = names.index("label") if "label" in names else len(names) - 1
        when = names.index("time") if "time" in names else None
        for line in lines:
            if line is None:
                yield Reading()
            elif line.strip():
                skip -= 1
                if skip < 0:
                    yield _row(next(csv.reader([line])), len(names), label, when)


def _lines(stream: Any, follow: bool) -> Iterator[str | None]:
    """Yield whole lines; None while there is no further one."""
    part = ""
    while True:
        part += stream.readline()
        if part.endswith("\n") or (part and not follow):
            yield part
            part = ""
        elif follow:
            time.sleep(_POLL_SECONDS)
            yield None
        else:
            return


def _row(fields: list[str], width: int, label: int, when: int | None) -> Reading:
    if len(fields) != width:
        return Reading(x=f"{len(fields)} fields", y=0)
    numbers = [_number(field) for place, field in enumerate(fields) if place not in (label, when)]
    y = fields[label].strip()
    return Reading(
        x=np.array(numbers, np.float32),
        y=_number(y) if y else None,
        t=None if when is None else _number(fields[when]),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@register_source("dir")
def folder(place: str, skip: int, follow: bool) -> Iterator[Reading]:
    """Yield the samples of ``.npz`` files (arrays ``x``, perhaps ``y`` and ``t``) in the order of their names.

    A file that was read to its end is moved to the folder ``done`` inside; write a new one under another name and
    rename it, so that it is never read half.
    """
    del skip
    path = Path(place)
    if not path.is_dir():
        raise StreamError(f"there is no folder {path}")
    return _files(path, follow)


def _files(path: Path, follow: bool) -> Iterator[Reading]:
    while True:
        waiting = sorted(path.glob("*.npz"))
        for file in waiting:
            yield from _file(file)
            (path / _DONE).mkdir(exist_ok=True)
            file.rename(path / _DONE / file.name)
        if not waiting:
            if not follow:
                return
            time.sleep(_POLL_SECONDS)
            yield Reading()


def _file(file: Path) -> Iterator[Reading]:
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("x", "y", "t") if name in stored.files}
        x = arrays["x"]
        y, t = (arrays.get(name, [None] * len(x)) for name in ("y", "t"))
        if not len(x) == len(y) == len(t):
            raise ValueError(f"{len(x)} samples, {len(y)} labels, {len(t)} times")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        yield Reading(x=f"{file.name}: {error}", y=0)
        return
    for number, each in enumerate(zip(x, y, t, strict=True), start=1):
        yield Reading(*each, ends=number == len(x))


@register_source("socket")
def lines_over_socket(place: str, skip: int, follow: bool) -> Iterator[Reading]:
    """Listen, and yield the lines of whoever connects.

    A line is JSON: ``{"x": [...], "y": 3, "t": 12.5}``, or ``{"id": 7, "y": 3}`` for a late label. Each is answered
    by a line that says what was predicted and by which id the label can be told. There is no lock on this door:
    listen on the loopback, or behind one.
    """
    del skip, follow
    host, _, port = place.rpartition(":")
    if not port.isdecimal():
        raise StreamError(f"cannot listen on {place!r}: give HOST:PORT")
    try:
        listening = socket.create_server((host or "127.0.0.1", int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise StreamError(f"cannot listen on {place}: {error}") from None
    return _connections(listening)


def _connections(listening: socket.socket) -> Iterator[Reading]:
    parts: dict[socket.socket, bytes] = {}
    with listening, selectors.DefaultSelector() as selector:
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ)
        try:
            while True:
                ready = [key.fileobj for key, _ in selector.select(_POLL_SECONDS)]
                if not ready:
                    yield Reading()
                for each in ready:
                    if each is listening:
                        connection = _accepted(listening)
                        if connection is not None:
                            parts[connection] = b""
                            selector.register(connection, selectors.EVENT_READ)
                        continue
                    assert isinstance(each, socket.socket)
                    data = _received(each)
                    *whole, part = (parts[each] + data).split(b"\n")
                    parts[each] = part
                    yield from (_message(line, _answering(each)) for line in whole if line.strip())
                    if not data or len(part) > _LONGEST_LINE:
                        selector.unregister(each)
                        each.close()
                        del parts[each]
        finally:
            for connection in parts:
                connection.close()


def _accepted(listening: socket.socket) -> socket.socket | None:
    try:
        connection, _ = listening.accept()
    except OSError:
        # Gone again, or more than there are file descriptors for.
        return None
    connection.settimeout(_ANSWER_SECONDS)
    return connection


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def _answering(connection: socket.socket) -> Callable[[dict[str, Any]], None]:
    def answer(said: dict[str, Any]) -> None:
        try:
            connection.sendall(json.dumps(said).encode() + b"\n")
        except OSError:
            # It does not wait for an answer, or is gone: what it sent counts all the same.
            return

    return answer


def _message(line: bytes, answer: Callable[[dict[str, Any]], None]) -> Reading:
    try:
        said = json.loads(line)
        sample_id = said.get("id")
        if sample_id is not None and not isinstance(sample_id, int):
            raise ValueError("the id is no whole number")
        x, y, t = (said.get(name) for name in ("x", "y", "t"))
    except (ValueError, AttributeError, RecursionError):
        return Reading(x="no JSON object", y=0, answer=answer)
    if sample_id is not None:
        return Reading(y=-1 if y is None else y, sample_id=sample_id, answer=answer)
    return Reading("no x" if x is None else _array(x), y, t, answer=answer)


def _array(x: Any) -> Any:
    try:
        return np.asarray(x, np.float32)
    except (ValueError, TypeError, OverflowError):
        return "no array"
