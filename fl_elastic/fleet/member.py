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
from pathlib import Path

from fl_elastic.fleet.serve import OTHERS_NOTHING, Launch

# Linux kills the process when the thread that started it ends for any reason. Flower's helper processes then end,
# too, because each of them watches its parent.
_ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this one is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
# Seconds; Flower's own shutdown takes less.
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
        File of its output, appended to that of earlier processes of the same name.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None


def start_member(logs: Path, name: str, launch: Launch) -> Member:
    """Start a process that is killed if this one ends."""
    launch.prepare()
    logs.mkdir(exist_ok=True)
    path = logs / f"{name}.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENDS_WITH_PARENT, str(os.getpid()), *launch.command],
            env=dict(launch.environment), cwd=launch.folder, stdin=subprocess.DEVNULL, stdout=log,
            # Ctrl-C in the terminal is handled by the process that started the fleet.
            stderr=log, start_new_session=True, umask=OTHERS_NOTHING,
        )  # fmt: skip
    return Member(name, process, path)


def end_members(members: Iterable[Member], grace: float = _GRACE_SECONDS) -> None:
    """Ask all processes to end at the same time, then kill those that remain and their descendants.

    Parameters
    ----------
    members : iterable of Member
        The processes.
    grace : float
        Seconds before they are killed; with 0 they are killed without being asked.
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
        # Runs even after a second Ctrl-C.
        for process in running:
            process.kill()
            process.wait()
        for pid, started in below:
            if started and started == _started(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return the direct and indirect child processes of a process, each with its start time."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if len(fields := _fields(int(folder.name))) > 1:
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found = list(parents.get(pid, ()))
    for each in found:
        found += parents.get(each, ())
    return [(each, _started(each)) for each in found]


def _started(pid: int) -> str:
    """Return the start time of a process, to distinguish it from later ones with its id; empty if it has ended."""
    fields = _fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _fields(pid: int) -> list[str]:
    """Return a process's fields from the state on, see proc_pid_stat(5); empty without the process or /proc."""
    try:
        # The process name, in brackets, may itself contain blanks and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return []
