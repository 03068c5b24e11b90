"""Cells in processes: all are done, in any order, and none outlives the one who asked for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fl_elastic_simulations.benchmarks.cells import finished_cells


def cell(folder: str, number: int, seconds: float) -> dict[str, int]:
    """Say that it began, take its time, say that it ended."""
    Path(folder, f"begun-{number}").write_text(str(os.getpid()))
    time.sleep(seconds)
    Path(folder, f"ended-{number}").touch()
    if number == 99:
        raise ValueError("a cell of its own mind")
    return {"number": number}


def test_every_cell_is_run_once(tmp_path: Path) -> None:
    cells = {f"cell {number}": (str(tmp_path), number, 0.0) for number in range(3)}
    assert dict(finished_cells(cell, cells, 2)) == {f"cell {n}": {"number": n} for n in range(3)}
    assert dict(finished_cells(cell, {}, 2)) == {}


def test_stopping_early_ends_the_cells_at_work(tmp_path: Path) -> None:
    cells = {"first": (str(tmp_path), 0, 0.0)} | {
        f"cell {number}": (str(tmp_path), number, 600.0) for number in range(1, 4)
    }
    found = finished_cells(cell, cells, 2)
    assert next(found) == ("first", {"number": 0})
    found.close()  # type: ignore[attr-defined]
    assert _all_gone(tmp_path)
    assert not list(tmp_path.glob("ended-[1-9]"))


def test_a_failing_cell_is_heard_of(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="own mind"):
        dict(finished_cells(cell, {"bad": (str(tmp_path), 99, 0.0)}, 1))
    assert _all_gone(tmp_path)


def test_cells_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "from test_cells import cell\n"
        "from fl_elastic_simulations.benchmarks.cells import finished_cells\n"
        "if __name__ == '__main__':\n"
        f"    dict(finished_cells(cell, {{'long': ({str(tmp_path)!r}, 1, 600.0)}}, 1))\n"
    )
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]
    )
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path})
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "begun-1").exists() and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert (tmp_path / "begun-1").exists()
    assert _all_gone(tmp_path)


def _all_gone(folder: Path) -> bool:
    """Whether the processes of all cells that began are gone within a while."""
    end = time.monotonic() + 20
    pids = [int(path.read_text() or 0) for path in folder.glob("begun-*")]
    while time.monotonic() < end:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        # A process that ended and was not waited for is still listed.
        return pid > 0 and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]
    except OSError:
        return False
