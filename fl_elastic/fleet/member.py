"""One process of a local fleet, which ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fl_elastic.fleet.serve import OTHERS_NOTHING, Launch

__all__ = ["Member", "descendants", "end_members", "start_member"]

# Linux kills it when the thread that started it ends, however that does; what Flower's processes start themselves
# ends with these, since each of them watches its parent.
_ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this one is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
# Flower's own shutdown takes less.
_GRACE_SECONDS = 8.0


@dataclass(frozen=True)
class Member:
    """One process of the fleet.

    Parameters
    ----------
    name : str
        ``server``, or the name of a node.
    process : subprocess.Popen
        Flower's process.
    log : Path
        What it printed, after what those before it did.
    started : datetime
        When, to the second.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    started: datetime

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None


def start_member(logs: Path, name: str, launch: Launch) -> Member:
    """Start a process that is killed if this one ends."""
    started = datetime.now(UTC).replace(microsecond=0)
    launch.prepare()
    logs.mkdir(exist_ok=True)
    path = logs / f"{name}.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENDS_WITH_PARENT, str(os.getpid()), *launch.command],
            env=dict(launch.environment), cwd=launch.folder, stdin=subprocess.DEVNULL, stdout=log,
            # Ctrl-C of a terminal is the business of whoever started the fleet.
            stderr=log, start_new_session=True, umask=OTHERS_NOTHING,
        )  # fmt: skip
    return Member(name, process, path, started)


def end_members(members: Iterable[Member], grace: float = _GRACE_SECONDS) -> None:
    """Ask processes to end, all of them at once, and kill what is left of them and of what they started.

    Parameters
    ----------
    members : iterable of Member
        The processes.
    grace : float
        Seconds that they have; with 0 they are killed without being asked.
    """
    running = [member.process for member in members if member.running]
    below = [pid for process in running for pid in descendants(process.pid)]
    try:
        for process in running if grace else ():
            process.terminate()
        until = time.monotonic() + grace
        while time.monotonic() < until and any(each.poll() is None for each in running):
            time.sleep(0.05)
    finally:
        # Also after a second Ctrl-C.
        for process in running:
            process.kill()
            process.wait()
        for pid, started in below:
            if started and started == _started(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return the processes that one has started, and those that they have, each with when it was."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if len(fields := _fields(int(folder.name))) > 1:
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found = list(parents.get(pid, ()))
    for each in found:
        found += parents.get(each, ())
    return [(each, _started(each)) for each in found]


def _started(pid: int) -> str:
    """Return when a process started, which tells it from a later one of the same number; empty if it has ended."""
    fields = _fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _fields(pid: int) -> list[str]:
    """Return state, parent and so on, see proc_pid_stat(5); nothing where there is no such process or no /proc."""
    try:
        # The name in brackets may hold blanks and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return []
