"""Ctrl-C ends a run after what it has finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_by_interrupt() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C inside the block into an event; a second one is a KeyboardInterrupt as usual.

    The event is also set on leaving, so that a server thread which still waits for clients ends, too.
    """
    stop = threading.Event()
    # Only the main thread may set signal handlers; in other threads Ctrl-C is handled as before.
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)

    def first(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop.set()
        signal.signal(signal.SIGINT, before)

    if in_main:
        signal.signal(signal.SIGINT, first)
    try:
        yield stop
    finally:
        stop.set()
        if in_main:
            signal.signal(signal.SIGINT, before)
