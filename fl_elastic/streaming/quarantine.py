"""Rename damaged files for later inspection, and keep only the newest few."""

from __future__ import annotations

import re
from pathlib import Path

KEPT = 3
"""Number of damaged files of one name that are kept."""
# A database has a log beside it, and the log's index.
_BESIDE = ("", "-wal", "-shm")


def quarantine(path: Path) -> Path:
    """Rename a damaged file, and the log and index of a database; return the new path.

    Raises
    ------
    OSError
        If the folder does not permit renaming.
    """
    aside = quarantine_path(path)
    for end in _BESIDE:
        file = path.with_name(path.name + end)
        if file.exists():
            file.rename(aside.with_name(aside.name + end))
    forget_oldest(path)
    return aside


def quarantine_path(path: Path) -> Path:
    """Return the new path for a damaged file: in the same folder, with a number above all earlier ones.

    >>> quarantine_path(Path("nowhere/samples.db")).as_posix()
    'nowhere/samples.db.damaged-1'
    """
    return path.with_name(f"{path.name}.damaged-{max(_aside(path), default=0) + 1}")


def forget_oldest(path: Path) -> None:
    """Delete all damaged copies of a file, with their logs and indices, except the newest few.

    Raises
    ------
    OSError
        If a file cannot be deleted.
    """
    found = _aside(path)
    for number in sorted(found)[:-KEPT]:
        for file in found[number]:
            file.unlink(missing_ok=True)


def _aside(path: Path) -> dict[int, list[Path]]:
    """Return the damaged copies by number; each number has up to three files of a database."""
    pattern = re.compile(re.escape(path.name) + r"\.damaged-(\d+)(?:-wal|-shm)?")
    found: dict[int, list[Path]] = {}
    for file in path.parent.glob("*.damaged-*"):
        named = pattern.fullmatch(file.name)
        if named is not None:
            found.setdefault(int(named[1]), []).append(file)
    return found
