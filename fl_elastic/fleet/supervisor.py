"""``python -m fl_elastic.fleet.supervisor PIDFILE COMMAND...``: run a command that leaves nothing behind.

It ends with its command, and takes with it whatever that has started, also what has left the session; it ends at
once when its standard input does, which is how it learns that the process that started it is gone, however
that died.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["children_of", "is_alive", "main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 8.0  # seconds; Flower's own shutdown takes less
_PROC = Path("/proc")


def main(arguments: list[str]) -> int:
    """Run a command and return its exit status as a shell would.

    Parameters
    ----------
    arguments : list of str
        File for the command's process id, path of the command, its arguments.
    """
    pidfile, *command = arguments
    # Orphans become children of this process instead of the machine's first one.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_prepare_child)
    Path(pidfile).write_text(str(child.pid))
    signal.signal(signal.SIGTERM, lambda *_: _ask_to_end(child.pid))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # Ctrl-C of a terminal is the business of whoever started the fleet.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deserted = threading.Event()
    threading.Thread(target=_end_with_stdin, args=(child.pid, deserted), daemon=True).start()
    status = _wait_for(child.pid)
    _end_all(child.pid)
    return 1 if deserted.is_set() else status


def _wait_for(pid: int) -> int:
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            return 1
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _ask_to_end(pid: int) -> None:
    """Ask the command to end; whoever does not listen is ended a little later."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    late = threading.Timer(_GRACE, _end_all, [pid])
    late.daemon = True
    late.start()


def _end_with_stdin(command: int, deserted: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    deserted.set()
    _end_all(command)
    os._exit(1)


def _end_all(command: int) -> None:
    """Kill everything below this process, until nothing is left.

    The command itself is collected by whoever waits for its status.
    """
    while below := children_of(os.getpid()):
        for pid in below:
            for victim in (pid, *_all_below(pid)):
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for pid in below:
            if pid == command:
                continue
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        time.sleep(0.02)


def _all_below(pid: int) -> list[int]:
    found = list(children_of(pid))
    for other in found:
        found += children_of(other)
    return found


def _prepare_child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    # Where there is no such call, the end of standard input is still noticed.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, value, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """Return the ids of all processes that this one started and that have not been collected."""
    found = []
    for folder in _PROC.glob("[0-9]*"):
        fields = _fields(folder)
        if len(fields) > 1 and fields[1] == str(pid):
            found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    fields = _fields(_PROC / str(pid))
    return bool(fields) and fields[0] not in ("Z", "X")


def _fields(folder: Path) -> list[str]:
    """Return state, parent and so on; nothing where the process has gone."""
    try:
        # The name in brackets may hold blanks and brackets.
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
