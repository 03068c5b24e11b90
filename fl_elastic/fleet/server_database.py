"""Keep the server's database usable when Flower's release changes: no release opens a later one's database."""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from fl_elastic.errors import FleetError
from fl_elastic.state.files import OWNER_ONLY, write_atomically

_REGISTER = "keys that were registered since are not in it: run fl-elastic fleet register, with the fleet's folder"


def fit_to_release(database: Path, version: str) -> str:
    """Provide a database that a SuperLink of this version can open; return a message, empty if nothing was done.

    When another minor release of Flower starts, the database is copied to a name that contains the previous
    release. When an older release starts, its own copy is restored, with the content from when that release last
    ran. Call this while no SuperLink runs.

    Parameters
    ----------
    database : Path
        Path of the database; it may not exist yet.
    version : str
        Version of the Flower to be started.

    Raises
    ------
    FleetError
        If the database cannot be copied.
    """
    mark, now = database.with_name(f"{database.name}.release"), _minor(version)
    before = _read(mark)
    try:
        said = _switched(database, before, now) if database.exists() and before != now else ""
        if before != now:
            write_atomically(mark, ".".join(map(str, now)).encode(), OWNER_ONLY)
    except (OSError, sqlite3.Error) as error:
        raise FleetError(
            f"{database} cannot be kept before another release of Flower opens it ({error}): make room beside it"
        ) from None
    return said


def _switched(database: Path, before: tuple[int, ...], now: tuple[int, ...]) -> str:
    # A database without a version mark is from before marks were introduced.
    kept = _copy_of(database, before) if before else database.with_name(f"{database.name}.before")
    _copy(database, kept)
    if not before or now > before:
        return f"the database was copied to {kept.name} before Flower {_text(now)} opens it"
    for end in ("-wal", "-shm"):
        database.with_name(database.name + end).unlink(missing_ok=True)
    earlier = _copy_of(database, now)
    if earlier.exists():
        _copy(earlier, database)
        return f"the database is that of Flower {_text(now)} again, the later one is {kept.name}; {_REGISTER}"
    database.unlink()
    return (
        f"Flower {_text(now)} cannot open the database of {_text(before)}, which is {kept.name} now, and begins a "
        f"new one; {_REGISTER}"
    )


def _copy(source: Path, target: Path) -> None:
    """Copy a database, including its log, completely or not at all."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, OWNER_ONLY))
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(temporary)) as new:
            old.backup(new)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_of(database: Path, release: tuple[int, ...]) -> Path:
    return database.with_name(f"{database.name}.flower-{_text(release)}")


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _minor(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a release, which determine the format of its database.

    >>> _minor("1.42.0"), _minor("1.9.dev3+x")
    ((1, 42), (1, 9))
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _read(mark: Path) -> tuple[int, ...]:
    try:
        return _minor(mark.read_text())
    except (OSError, UnicodeDecodeError):
        return ()
