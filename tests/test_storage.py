"""Atomic writing: a reader sees the old content or the new, never half."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fl_elastic.storage import write_atomically


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
