"""Damaged files are renamed, so that somebody may look at them; only the newest few stay."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["KEPT", "forget_oldest", "quarantine", "quarantine_path"]

KEPT = 3
"""Damaged files of one name that stay."""
# A database has a log beside it, and the log's index.
_BESIDE = ("", "-wal", "-shm")


def quarantine(path: Path) -> Path:
    """Rename a damaged file, with the log and index of a database; return its new path.

    Raises
    ------
    OSError
        If the folder does not let it be renamed.
    """
    aside = quarantine_path(path)
    for end in _BESIDE:
        file = path.with_name(path.name + end)
        if file.exists():
            file.rename(aside.with_name(aside.name + end))
    forget_oldest(path)
    return aside


def quarantine_path(path: Path) -> Path:
    """Return where a damaged file goes: beside it, under a number that is higher than all before.

    >>> quarantine_path(Path("nowhere/samples.db")).as_posix()
    'nowhere/samples.db.damaged-1'
    """
    return path.with_name(f"{path.name}.damaged-{max(_aside(path), default=0) + 1}")


def forget_oldest(path: Path) -> None:
    """Delete what was put aside of a file, and what lay beside that, but for the newest.

    Raises
    ------
    OSError
        If one cannot be deleted.
    """
    found = _aside(path)
    for number in sorted(found)[:-KEPT]:
        for file in found[number]:
            file.unlink(missing_ok=True)


def _aside(path: Path) -> dict[int, list[Path]]:
    """Return files by number; a database has up to three of them."""
    pattern = re.compile(re.escape(path.name) + r"\.damaged-(\d+)(?:-wal|-shm)?")
    found: dict[int, list[Path]] = {}
    for file in path.parent.glob("*.damaged-*"):
        named = pattern.fullmatch(file.name)
        if named is not None:
            found.setdefault(int(named[1]), []).append(file)
    return found
