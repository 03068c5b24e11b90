"""Opening the file under a sample store: made, checked, and put aside when it is damaged."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from fl_elastic.errors import StoreError
from fl_elastic.streaming.aside import forget_oldest, name_aside

__all__ = ["beside", "connected", "is_damage", "put_aside"]

_LOG = logging.getLogger("fl_elastic")
_FORMAT = "1"
_BUSY_SECONDS = 30.0
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = {"meta", "samples", "classes"}
_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE samples(
    slot INTEGER PRIMARY KEY, id INTEGER NOT NULL, y INTEGER NOT NULL, draw REAL NOT NULL,
    t REAL NOT NULL, version TEXT NOT NULL, outputs BLOB, x BLOB NOT NULL);
CREATE TABLE classes(y INTEGER PRIMARY KEY, n INTEGER NOT NULL);
CREATE UNIQUE INDEX by_id ON samples(id);
CREATE INDEX by_draw ON samples(draw);
CREATE INDEX by_class ON samples(y, draw);
"""


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether an error says that the file itself is damaged, rather than busy, full or unreachable."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _DAMAGE


def beside(path: Path) -> tuple[Path, Path]:
    """Return where the log of a file is, and the log's index."""
    return path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")


def connected(path: Path, page_size: int) -> sqlite3.Connection:
    """Open a store's file, made if it is not there, put aside and made anew if it is damaged.

    Raises
    ------
    StoreError
        If it cannot be opened, or is somebody else's.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _prepared(path, page_size)
    except (OSError, StoreError, sqlite3.OperationalError) as error:
        raise StoreError(f"cannot open the sample store {path}: {error}") from None
    except sqlite3.DatabaseError as damage:
        put_aside(path, str(damage))
    try:
        return _prepared(path, page_size)
    except (sqlite3.DatabaseError, OSError) as error:
        raise StoreError(f"cannot start a fresh sample store {path}: {error}") from None


def put_aside(path: Path, why: str) -> Path:
    """Rename a damaged file with what is beside it, say so, and return where it is now.

    Raises
    ------
    StoreError
        If the folder does not let it be renamed.
    """
    aside = name_aside(path)
    try:
        for file, target in zip(
            (path, *beside(path)), (aside, *beside(aside)), strict=True
        ):  # fmt: skip
            if file.exists():
                file.rename(target)
        forget_oldest(path)
    except OSError as error:
        raise StoreError(
            f"the sample store {path} is damaged ({why}) and cannot be put aside: {error}"
        ) from None
    _LOG.error(
        "the sample store %s is damaged (%s): it was put aside as %s, and a fresh one is started",
        path, why, aside.name,
    )  # fmt: skip
    return aside


def _prepared(path: Path, page_size: int) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        _prepare(connection, page_size)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, page_size: int) -> None:
    """Set the connection up and make the tables; raise sqlite3.DatabaseError where the file is damaged."""
    tables = _tables(connection)
    if tables and not tables & _TABLES:
        # Somebody's file, and none of ours: left as it is.
        raise StoreError(
            f"it is no sample store, but a database with {', '.join(sorted(tables)[:3])}"
        )
    connection.execute(f"PRAGMA page_size = {page_size}")
    connection.execute("PRAGMA journal_mode = WAL")
    # A killed process loses nothing that was committed; a power cut perhaps the last commits, never the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    # Some builds would write zeros over all that leaves: twice the bytes, and more than the log's bound foresees.
    connection.execute("PRAGMA secure_delete = FAST")
    # It is shortened by hand, see `Database.writing`.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("BEGIN IMMEDIATE")
    try:
        if tables := _tables(connection):
            _check(connection, tables)
        else:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('format', ?)", (_FORMAT,))
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _tables(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {str(row[0]) for row in rows}


def _check(connection: sqlite3.Connection, tables: set[str]) -> None:
    if not _TABLES <= tables:
        raise sqlite3.DatabaseError(f"it has the tables {sorted(tables)}, not those of a store")
    row = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if row is None or row[0] != _FORMAT:
        raise sqlite3.DatabaseError(f"its format is {row and row[0]}, not {_FORMAT}")
    answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if answer != "ok":
        raise sqlite3.DatabaseError(str(answer))
