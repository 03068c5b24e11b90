"""A socket as a source: it answers each line of JSON from any client."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fl_elastic.errors import StreamError
from fl_elastic.streaming.intake import Unreadable
from fl_elastic.streaming.sources import (
    LONGEST_LINE,
    POLL_SECONDS,
    SOURCES,
    TOO_LONG,
    SourceReading,
)

_PART = 2**16
_MOST_CONNECTIONS = 100
# Bytes of unread answers above which a client's lines are not read.
_MOST_UNREAD = 2**18
# Most bytes of unfinished lines, all clients together.
_MOST_UNFINISHED = 4 * LONGEST_LINE
# A client is disconnected if it has not read any of its answers for this many seconds.
_PATIENCE_SECONDS = 60.0
_LONGEST_NAME = 100
_MOST_ID = 2**63
_NUMBERED = "numbered"
_NO_ID = "the id is no whole number and no short name"
_WHOSE_NUMBER = (
    "senders have used numbers as ids of their own, so this number may be such an id or a sample_id: let senders "
    "give their own ids as text"
)


@SOURCES.register("socket")
def lines_over_socket(
    where: str, after: Mapping[str, Any], follow: bool
) -> Iterator[SourceReading]:
    """Listen, and yield the lines of all clients in turn.

    A line is JSON: ``{"x": [...], "y": 3}``, or ``{"id": 7, "y": 3}`` for a late label. Each is answered by a line
    with the prediction and the ``sample_id`` under which a label can be given later. A sample whose answer has a
    ``sample_id`` is not lost if this process dies. Any other sample may be sent again; it counts once if its line
    also has the sender's own ``id``. Such an id should be text: once a sender's id was a number, labels for numbers
    are refused, because a number may be either such an id or a ``sample_id``. As long as a client does not read its
    answers, its lines are not read. There is no authentication: listen on the loopback interface, or behind a proxy
    that authenticates.
    """
    del follow
    host, _, port = where.rpartition(":")
    if not port.isdecimal():
        raise StreamError(f"cannot listen on {where!r}: give HOST:PORT")
    try:
        listening = socket.create_server((host or "127.0.0.1", int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise StreamError(f"cannot listen on {where}: {error}") from None
    return _Door(listening, numbered=bool(after.get(_NUMBERED))).readings()


@dataclass(eq=False)
class _Client:
    """A connected client, with its lines that wait to be handled and the answers that it has not read."""

    connection: socket.socket
    lines: deque[bytes] = field(default_factory=deque)
    part: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)
    ended: bool = False
    stuck_since: float | None = None

    def receive(self) -> None:
        """Read the bytes that the client has sent, at most one buffer, without waiting."""
        try:
            data = self.connection.recv(_PART)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # An unfinished line was cut off in transit and is dropped.
            self.ended = True
            return
        start = len(self.part)
        self.part += data
        if self.part.find(b"\n", start) >= 0:
            *whole, rest = bytes(self.part).split(b"\n")
            self.lines.extend(
                b"" if len(line) > LONGEST_LINE else line for line in whole if line.strip()
            )
            self.part = bytearray(rest)
        if len(self.part) > LONGEST_LINE:
            self.refuse()

    def refuse(self) -> None:
        """Drop the line that is being received, answer that it is too long, and disconnect."""
        self.lines.append(b"")
        self.part.clear()
        self.ended = True

    def answer(self, said: dict[str, Any]) -> None:
        """Queue an answer and send as much as possible."""
        self.unread += json.dumps(said).encode() + b"\n"
        self.send()

    def send(self) -> None:
        """Send as much as the client accepts."""
        if not self.unread:
            return
        try:
            sent = self.connection.send(self.unread)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The client is gone; the lines that it sent are still handled.
            self.unread.clear()
            self.ended, self.stuck_since = True, None
            return
        del self.unread[:sent]
        if sent or not self.unread:
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = time.monotonic()

    @property
    def is_heard(self) -> bool:
        """Whether the client reads its answers; if not, no further lines are read from it."""
        return len(self.unread) <= _MOST_UNREAD

    @property
    def wants(self) -> int:
        """Events of the socket to wait for, as a `selectors` mask."""
        reads = self.is_heard and not self.lines and not self.ended
        return (selectors.EVENT_READ if reads else 0) | (
            selectors.EVENT_WRITE if self.unread else 0
        )

    @property
    def is_done(self) -> bool:
        """Whether the connection can be closed."""
        stuck = self.stuck_since is not None
        if stuck and time.monotonic() - (self.stuck_since or 0) > _PATIENCE_SECONDS:
            return True
        return self.ended and not self.lines and not self.unread


class _Door:
    """The listening socket and its clients."""

    def __init__(self, listening: socket.socket, *, numbered: bool) -> None:
        self._listening = listening
        self._clients: list[_Client] = []
        # Whether a sender has ever given a sample a number for its own id.
        self._numbered = numbered

    def readings(self) -> Iterator[SourceReading]:
        """Yield the clients' lines without end, one of each client in turn."""
        self._listening.setblocking(False)
        with self._listening:
            try:
                while True:
                    busy = any(each.lines and each.is_heard for each in self._clients)
                    if not self._looked(0.0 if busy else POLL_SECONDS) and not busy:
                        yield SourceReading()
                    for client in list(self._clients):
                        if client.lines and client.is_heard:
                            yield self._told_apart(_message(client.lines.popleft(), client))
                    self._close(client for client in list(self._clients) if client.is_done)
            finally:
                self._close(list(self._clients))

    def _told_apart(self, reading: SourceReading) -> SourceReading:
        """Return the reading; one whose number may be a sender's own id or a ``sample_id`` is refused."""
        self._numbered |= reading.name is not None and reading.name.lstrip("-").isdecimal()
        if self._numbered and isinstance(reading.sample_id, int):
            return SourceReading(x=Unreadable(_WHOSE_NUMBER), y=0, answer=reading.answer)
        # Saved with the sample's position, so that it is known after a restart.
        return replace(reading, position={_NUMBERED: True}) if self._numbered else reading

    def _looked(self, seconds: float) -> bool:
        """Accept connections, receive and send; return whether anything was received."""
        with selectors.DefaultSelector() as selector:
            if len(self._clients) < _MOST_CONNECTIONS:
                selector.register(self._listening, selectors.EVENT_READ)
            for client in self._clients:
                if client.wants:
                    selector.register(client.connection, client.wants, client)
            heard = False
            for key, events in selector.select(seconds):
                if key.data is None:
                    self._let_in()
                    continue
                if events & selectors.EVENT_WRITE:
                    key.data.send()
                if events & selectors.EVENT_READ:
                    heard = True
                    key.data.receive()
        while sum(len(each.part) for each in self._clients) > _MOST_UNFINISHED:
            max(self._clients, key=lambda each: len(each.part)).refuse()
        return heard

    def _let_in(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            # The client has gone, or there are no file descriptors left.
            time.sleep(0.01)
            return
        connection.setblocking(False)
        # Send each answer at once: it is one small packet.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients.append(_Client(connection))

    def _close(self, clients: Any) -> None:
        for client in clients:
            client.connection.close()
            self._clients.remove(client)


def _message(line: bytes, client: _Client) -> SourceReading:
    if not line:
        return SourceReading(x=Unreadable(TOO_LONG), y=0, answer=client.answer)
    try:
        said = json.loads(line)
        # CSV tables use the name "label".
        sample_id, x, y = said.get("id"), said.get("x"), said.get("y", said.get("label"))
    except (ValueError, AttributeError, RecursionError):
        return SourceReading(x=Unreadable("no JSON object"), y=0, answer=client.answer)
    if sample_id is not None and not _is_id(sample_id):
        return SourceReading(x=Unreadable(_NO_ID), y=0, answer=client.answer)
    if sample_id is not None and x is None:
        return SourceReading(y=y, sample_id=sample_id, answer=client.answer)
    name = None if sample_id is None else str(sample_id)
    return SourceReading(
        Unreadable("no x in it") if x is None else _array(x), y, answer=client.answer, name=name
    )


def _is_id(sample_id: Any) -> bool:
    """Return whether an id is an integer or a short name."""
    if isinstance(sample_id, int) and not isinstance(sample_id, bool):
        return abs(sample_id) < _MOST_ID
    return isinstance(sample_id, str) and 0 < len(sample_id) <= _LONGEST_NAME


def _array(x: Any) -> Any:
    try:
        with np.errstate(over="ignore"):
            return np.asarray(x, np.float32)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        return Unreadable("x is not an array of numbers")
