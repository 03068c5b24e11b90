"""One process of a local fleet: started so that nothing of it is left, whatever happens."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fl_elastic.errors import FleetError
from fl_elastic.fleet.serve import OTHERS_NOTHING, Launch
from fl_elastic.fleet.supervisor import is_alive

__all__ = ["Member", "end_member", "start_member"]


@dataclass(frozen=True)
class Member:
    """One process of the fleet.

    Parameters
    ----------
    name : str
        ``server``, or the name of a node.
    keeper : subprocess.Popen
        Stands between: it ends everything below when this process is gone.
    pid : int
        Of Flower's process itself.
    log : Path
        What it printed, and those before it.
    started : datetime
        When, to the second.
    """

    name: str
    keeper: subprocess.Popen[bytes]
    pid: int
    log: Path
    started: datetime

    @property
    def running(self) -> bool:
        """Whether Flower's process runs."""
        return is_alive(self.pid) and self.keeper.poll() is None


def start_member(logs: Path, name: str, launch: Launch) -> Member:
    """Start a process below a keeper of its own.

    Raises
    ------
    FleetError
        If it cannot be started.
    """
    started = datetime.now(UTC).replace(microsecond=0)
    launch.prepare()
    logs.mkdir(exist_ok=True)
    pidfile, path = logs / f"{name}.pid", logs / f"{name}.log"
    pidfile.unlink(missing_ok=True)
    with path.open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "fl_elastic.fleet.supervisor", str(pidfile), *launch.command],
            env=dict(launch.environment), cwd=launch.folder, stdin=subprocess.PIPE, stdout=log,
            stderr=log, start_new_session=True, umask=OTHERS_NOTHING,
        )  # fmt: skip
    until = time.monotonic() + 30
    while not (text := pidfile.read_text() if pidfile.exists() else ""):
        if keeper.poll() is not None or time.monotonic() > until:
            keeper.kill()
            raise FleetError(f"{name} could not be started: {path.read_text()[-500:]}")
        time.sleep(0.02)
    return Member(name, keeper, int(text), path, started)


def end_member(member: Member, *, at_once: bool = False) -> None:
    """Ask a process to end, unless it is to end at once, and see to it that it does, with all that it started."""
    if not at_once and member.keeper.poll() is None:
        member.keeper.terminate()
        try:
            member.keeper.wait(15)
        except subprocess.TimeoutExpired:
            pass
    if member.keeper.stdin is not None:
        member.keeper.stdin.close()  # the keeper kills what is left
    try:
        member.keeper.wait(15)
    except subprocess.TimeoutExpired:
        member.keeper.kill()
        member.keeper.wait(5)
