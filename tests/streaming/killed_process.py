"""A process that is killed at work, and what it had reported by then."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable


def reported(work: Callable[[int], None], size: int, count: int, seconds: float) -> list[bytes]:
    """Return the words that ``work`` wrote to its pipe until it was killed, so long after so many of them.

    However slow the machine is: only a process that hangs is given up.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work(writing)
        finally:
            os._exit(1)
    os.close(writing)
    data = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        try:
            while len(data) < size * count and select.select([pipe], [], [], 60)[0]:
                more = pipe.read(size * count - len(data))
                assert more, "it ended by itself"
                data += more
            time.sleep(seconds)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        data += pipe.readall()
    return [data[place : place + size] for place in range(0, len(data) // size * size, size)]
