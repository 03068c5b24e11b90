"""What is put aside, or left behind by killed processes, does not pile up; one learner to a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fl_elastic.errors import StreamError
from fl_elastic.streaming import SampleStore
from fl_elastic.streaming.folder_lock import owning
from fl_elastic.streaming.learner_state import StateFolder
from fl_elastic.streaming.quarantine import KEPT, forget_oldest, quarantine_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_stay_under_numbers_that_only_grow(tmp_path: Path) -> None:
    path = tmp_path / "learner.state"
    (tmp_path / "other.npz.damaged-1").write_text("")
    (tmp_path / "learner.state.damaged-x").write_text("")
    for number in range(12):
        path.write_text(str(number))
        path.rename(quarantine_path(path))
        forget_oldest(path)
    assert names(tmp_path) == [
        "learner.state.damaged-10", "learner.state.damaged-11", "learner.state.damaged-12",
        "learner.state.damaged-x", "other.npz.damaged-1",
    ]  # fmt: skip
    assert (tmp_path / "learner.state.damaged-12").read_text() == "11"


def test_damaged_states_do_not_pile_up(tmp_path: Path) -> None:
    for _ in range(KEPT + 2):
        (tmp_path / "learner.state").write_text("nonsense")
        assert StateFolder(tmp_path).load() is None
    assert names(tmp_path) == [f"learner.state.damaged-{number}" for number in (3, 4, 5)]


def test_damaged_stores_do_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "samples.db"
    for _ in range(KEPT + 2):
        with SampleStore(path, 2**18) as store:
            store.add(np.zeros(3, np.float32), 0)
        path.write_bytes(os.urandom(4096))
    SampleStore(path, 2**18).close()
    aside = [name for name in names(tmp_path) if "damaged" in name]
    assert aside == [f"samples.db.damaged-{number}" for number in (3, 4, 5)]


def test_what_lies_beside_a_damaged_store_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "samples.db"
    for number in range(1, KEPT + 2):
        for end in ("", "-wal", "-shm"):
            (tmp_path / f"samples.db.damaged-{number}{end}").write_text("")
    forget_oldest(path)
    assert len(names(tmp_path)) == 3 * KEPT
    assert not list(tmp_path.glob("samples.db.damaged-1*"))


def test_opening_a_state_folder_deletes_what_killed_processes_left(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for place in ("", "inbox", "rounds"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / f".learner.state.{ended.pid}.tmp").write_bytes(b"half")
        (tmp_path / place / f".learner.state.{os.getpid()}.tmp").write_bytes(b"mine")
    StateFolder(tmp_path).load()
    left = [path.name for path in tmp_path.rglob("*.tmp")]
    assert left == [f".learner.state.{os.getpid()}.tmp"] * 3


def test_a_state_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StreamError, match="cannot write the state folder"):
        with owning(tmp_path / "state"):
            pass
