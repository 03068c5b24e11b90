"""Atomic writing: a reader sees the old content or the new, never half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_elastic.storage import only_one, remove_leftovers, write_atomically

HOLDER = """
import sys, time
from fl_elastic.storage import only_one
with only_one(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_content_arrives_and_folders_are_made(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file.bin"
    assert write_atomically(target, b"\x00\xffdata") == target
    assert target.read_bytes() == b"\x00\xffdata"


def test_a_text_path_will_do(tmp_path: Path) -> None:
    assert write_atomically(str(tmp_path / "file"), b"") == tmp_path / "file"
    assert (tmp_path / "file").read_bytes() == b""


def test_the_old_content_is_replaced_and_nothing_is_left_beside(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old and longer")
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_failure_keeps_the_old_content_and_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_until_the_last_moment_readers_see_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    seen = []
    replace = os.replace

    def look_then_replace(source: Path, destination: Path) -> None:
        seen.append((target.read_bytes(), Path(source).read_bytes(), Path(source).parent))
        replace(source, destination)

    monkeypatch.setattr(os, "replace", look_then_replace)
    write_atomically(target, b"new")
    assert seen == [(b"old", b"new", tmp_path)]


def test_what_dead_processes_left_half_written_is_deleted(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = (f".state.npz.{pid}.tmp" for pid in (ended.pid, os.getpid()))
    others = {"state.npz", f"mine.{ended.pid}.tmp", ".state.npz.x.tmp", alive}
    for name in (dead, *others):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f".folder.{ended.pid}.tmp").mkdir()
    assert remove_leftovers(tmp_path) == [dead]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == others
    assert remove_leftovers(tmp_path / "none") == []


def test_the_name_that_is_written_to_is_one_that_would_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert len(remove_leftovers(tmp_path)) == 1 and not list(tmp_path.iterdir())


def test_a_lock_is_held_by_one_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lock"
    with only_one(path), pytest.raises(BlockingIOError), only_one(path):
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), only_one(path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with only_one(path):
        pass
