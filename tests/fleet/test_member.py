"""Whatever happens, no process of a local fleet is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_processes import wait_until

from fl_elastic.fleet import member as member_module
from fl_elastic.fleet.member import Member, descendants, end_members, start_member
from fl_elastic.fleet.serve import Launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

# A process with a child of its own session, which has a child in turn: as Flower starts its helpers.
FAMILY = """
import os, signal, subprocess, sys, time
grandchild = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
child = (
    "import os, subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[3]], start_new_session=True);"
    "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
)
place, stubborn = sys.argv[1:]
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{place}/main", "w").write(str(os.getpid()))
subprocess.Popen(
    [sys.executable, "-c", child, f"{place}/child", grandchild, f"{place}/grandchild"],
    start_new_session=True,
)
time.sleep(600)
"""
PARENT = """
import sys, time
from pathlib import Path
sys.path.extend(sys.argv[1].split(":"))
from test_member import family
family(Path(sys.argv[2]))
time.sleep(600)
"""


def family(place: Path, stubborn: str = "") -> Member:
    command = (sys.executable, "-c", FAMILY, str(place), stubborn)
    return start_member(
        place / "logs", "one", Launch(command, os.environ, (place,), "127.0.0.1", 1)
    )


def pids(place: Path) -> list[int]:
    """Every process of a family, once all of them have begun."""
    files = [place / name for name in ("main", "child", "grandchild")]
    assert wait_until(lambda: all(each.exists() and each.read_text() for each in files))
    return [int(each.read_text()) for each in files]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for name in ("main", "child", "grandchild"):
        if (tmp_path / name).exists() and is_alive(pid := int((tmp_path / name).read_text())):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("stubborn", ["", "yes"])
def test_all_that_a_process_has_started_ends_with_it(
    place: Path, stubborn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = family(place, stubborn)
    every = pids(place)
    assert one.process.pid == every[0] and one.running
    assert [pid for pid, _ in descendants(every[0])] == every[1:]
    end_members([one], grace=0.5)
    assert one.process.returncode == -(signal.SIGKILL if stubborn else signal.SIGTERM)
    assert wait_until(lambda: not any(map(is_alive, every))) and not one.running
    # Once more changes nothing.
    end_members([one])


def test_a_second_interruption_ends_it_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = family(place, "yes")
    every = pids(place)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(member_module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        end_members([one], grace=600)
    monkeypatch.undo()
    assert wait_until(lambda: not any(map(is_alive, every)))


def test_a_killed_parent_takes_it_along(place: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, ":".join(sys.path), str(place)])
    try:
        main, *_ = pids(place)
        assert is_alive(main)
    finally:
        parent.kill()
        parent.wait()
    # Flower's own helpers watch their parent, and end then, too.
    assert wait_until(lambda: not is_alive(main))
