"""A bad link as a process between a node and its server: delay, losses as TCP feels them, and cuts."""

from __future__ import annotations

import random
import select
import socket
import threading
import time

_CHUNK = 16 * 1024
# What a lost segment costs a connection: the sender waits this long before it sends it again.
_RETRANSMISSION_SECONDS = 0.2


class BadLink:
    """Forwards connections on the loopback to a port.

    Every chunk arrives ``delay`` seconds late in either direction; a share ``loss`` of them is lost once and
    arrives after a retransmission, twice that if it is lost again, as over TCP. After `cut` nothing passes
    and nobody is answered until `mend`, as when a cable is pulled: connections stay open and wait.
    """

    def __init__(self, port: int, *, delay: float, loss: float, seed: int = 0) -> None:
        self._target, self._delay, self._loss = port, delay, loss
        self._draw = random.Random(seed)
        self._whole = threading.Event()
        self._whole.set()
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.chunks = self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break the link."""
        self._whole.clear()

    def mend(self) -> None:
        """Let connections through again."""
        self._whole.set()

    def close(self) -> None:
        """End for good."""
        self._closed.set()
        self._server.close()
        with self._lock:
            for each in self._open:
                _shut(each)
        self._whole.set()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._whole.wait()
            try:
                incoming, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(incoming,), daemon=True).start()

    def _join(self, incoming: socket.socket) -> None:
        try:
            outgoing = socket.create_connection(("127.0.0.1", self._target), timeout=10)
        except OSError:
            _shut(incoming)
            return
        with self._lock:
            self._open |= {incoming, outgoing}
        for source, sink in ((incoming, outgoing), (outgoing, incoming)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        waiting: list[tuple[float, bytes]] = []
        last, ended = 0.0, False
        try:
            while not ended or waiting:
                self._whole.wait()
                now = time.monotonic()
                if waiting and waiting[0][0] <= now:
                    sink.sendall(waiting.pop(0)[1])
                    continue
                until = waiting[0][0] - now if waiting else 1.0
                if ended:
                    time.sleep(until)
                    continue
                readable, _, _ = select.select([source], [], [], until)
                if readable:
                    data = source.recv(_CHUNK)
                    ended = not data
                    # In order: what follows a lost chunk waits for it.
                    last = max(last, time.monotonic() + self._delay + self._penalty())
                    if data:
                        waiting.append((last, data))
        except (OSError, ValueError):
            pass
        finally:
            for each in (source, sink):
                _shut(each)
                with self._lock:
                    self._open.discard(each)

    def _penalty(self) -> float:
        with self._lock:
            self.chunks += 1
            seconds, wait = 0.0, _RETRANSMISSION_SECONDS + self._delay
            while self._draw.random() < self._loss:
                self.lost += 1
                seconds, wait = seconds + wait, 2 * wait
            return seconds


def _shut(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    each.close()
