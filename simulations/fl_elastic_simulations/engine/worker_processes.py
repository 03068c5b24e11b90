"""Worker processes that end with this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any


@contextmanager
def worker_processes(
    workers: int,
    prepare: Callable[..., object] | None = None,
    *arguments: Any,
    tasks_each: int | None = None,
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of new processes, which are ended with the block, whatever they are doing.

    The processes also end when this one is killed.

    Parameters
    ----------
    workers : int
        Number of processes.
    prepare : callable, optional
        Called once in each process, with ``arguments``; importable.
    tasks_each : int, optional
        Number of tasks after which a process is replaced by a new one.
    """
    pool = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(prepare, arguments),
        max_tasks_per_child=tasks_each,
    )
    try:
        yield pool
    finally:
        # Do not wait, since that would run everything that was submitted to its end.
        processes = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def _begin(prepare: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    # A terminal sends Ctrl-C to all processes: the main process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare(*arguments)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
