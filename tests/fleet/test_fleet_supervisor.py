"""The keeper: whatever happens, nothing that was started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fl_elastic.fleet.supervisor import children_of, is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

# A process with a child of its own session, which has a child in turn: as Flower starts its helpers.
FAMILY = """
import os, subprocess, sys, time
grandchild = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
child = (
    "import os, subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[3]], start_new_session=True);"
    "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
)
place = sys.argv[1]
subprocess.Popen(
    [sys.executable, "-c", child, f"{place}/child", grandchild, f"{place}/grandchild"],
    start_new_session=True,
)
while not (os.path.exists(f"{place}/child") and os.path.exists(f"{place}/grandchild")):
    time.sleep(0.01)
STUBBORN
open(f"{place}/ready", "w").close()
ENDING
"""
KEEP = [sys.executable, "-m", "fl_elastic.fleet.supervisor"]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class Kept:
    """A family below a keeper."""

    def __init__(self, place: Path, ending: str = "time.sleep(600)", stubborn: str = "") -> None:
        self.place = place
        script = FAMILY.replace("ENDING", ending).replace("STUBBORN", stubborn)
        self.keeper = subprocess.Popen(
            [*KEEP, str(place / "main"), sys.executable, "-c", script, str(place)],
            stdin=subprocess.PIPE,
        )
        assert wait_until((place / "ready").exists)

    @property
    def pids(self) -> dict[str, int]:
        return {
            name: int((self.place / name).read_text()) for name in ("main", "child", "grandchild")
        }

    def none_is_left(self) -> bool:
        return wait_until(lambda: not any(map(is_alive, self.pids.values())))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def make(**how: str) -> Kept:
        made.append(Kept(tmp_path, **how))
        return made[-1]

    yield make
    for each in made:
        each.keeper.kill()
        each.keeper.wait()
        for pid in each.pids.values():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_it_ends_with_its_command_and_its_status(kept: Callable[..., Kept]) -> None:
    family = kept(ending="sys.exit(7)")
    assert family.keeper.wait(20) == 7
    assert family.none_is_left()


def test_a_killed_command_takes_the_rest_with_it(kept: Callable[..., Kept]) -> None:
    family = kept()
    assert all(map(is_alive, family.pids.values()))
    os.kill(family.pids["main"], signal.SIGKILL)
    assert family.keeper.wait(20) == 128 + signal.SIGKILL
    assert family.none_is_left()


def test_it_passes_on_the_wish_to_end(kept: Callable[..., Kept]) -> None:
    family = kept()
    family.keeper.terminate()
    assert family.keeper.wait(20) == 128 + signal.SIGTERM
    assert family.none_is_left()


def test_who_is_ended_keeps_its_status_whoever_sees_its_end_first(tmp_path: Path) -> None:
    # The keeper looks for the end of its command only once the thread that kills has seen it.
    slow = (
        "import os, sys, time; from fl_elastic.fleet import supervisor; wait = os.wait;"
        "supervisor._GRACE = 0.1; os.wait = lambda: (time.sleep(1), wait())[1];"
        "sys.exit(supervisor.main(sys.argv[1:]))"
    )
    stubborn = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "open(sys.argv[1], 'w').close(); time.sleep(600)"
    )
    ready = tmp_path / "ready"
    command = [sys.executable, "-c", stubborn, str(ready)]
    keeper = subprocess.Popen(
        [sys.executable, "-c", slow, str(tmp_path / "main"), *command], stdin=subprocess.PIPE
    )
    try:
        assert wait_until(ready.exists)
        keeper.terminate()
        assert keeper.wait(30) == 128 + signal.SIGKILL
    finally:
        keeper.kill()
        keeper.wait()


@pytest.mark.slow
def test_who_does_not_listen_is_ended_all_the_same(kept: Callable[..., Kept]) -> None:
    family = kept(stubborn="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    family.keeper.terminate()
    assert family.keeper.wait(30) == 128 + signal.SIGKILL
    assert family.none_is_left()


def test_it_ends_when_nobody_waits_for_it_any_more(kept: Callable[..., Kept]) -> None:
    family = kept()
    assert family.keeper.stdin is not None
    family.keeper.stdin.close()
    assert family.keeper.wait(20) == 1
    assert family.none_is_left()


def test_a_terminals_interruption_is_not_its_business(kept: Callable[..., Kept]) -> None:
    family = kept()
    family.keeper.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert family.keeper.poll() is None and is_alive(family.pids["main"])


def test_if_the_keeper_itself_is_killed_its_command_dies(kept: Callable[..., Kept]) -> None:
    family = kept()
    family.keeper.kill()
    assert wait_until(lambda: not is_alive(family.pids["main"]))


def test_children_and_life_are_told() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in children_of(os.getpid()) and is_alive(child.pid)
    finally:
        child.kill()
    assert wait_until(lambda: not is_alive(child.pid))  # a zombie is not alive
    child.wait()
    assert not is_alive(child.pid) and child.pid not in children_of(os.getpid())
