"""The installed command in a process of its own, and the processes below it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("fl-elastic")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would reach outside."""
    return (
        os.environ
        | {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "NO_COLOR": "1",
            "TERM": "dumb",
        }
        | changes
    )


def start(cwd: Path, *arguments: object, **changes: str) -> subprocess.Popen[str]:
    """Start the command as the leader of a process group, as a terminal does."""
    return subprocess.Popen(
        [str(COMMAND), *map(str, arguments)],
        cwd=cwd, env=environment(**changes), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def below(pid: int) -> set[int]:
    """Ids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold blanks; the parent is the second field after it.
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found, waiting = set[int](), [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    running = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            running.add(pid)
    return running
