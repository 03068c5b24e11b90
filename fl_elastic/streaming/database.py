"""The file under a sample store: written in whole transactions, within its bound."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fl_elastic.errors import StoreError
from fl_elastic.streaming.aside import forget_oldest, name_aside
from fl_elastic.streaming.store_bounds import LEAST_CAPACITY, StoreBounds, page_size_for

__all__ = [
    "LEAST_CAPACITY",
    "Database",
    "LogHeldUp",
    "beside",
    "connected",
    "is_damage",
    "put_aside",
]

# Another process may fill the log between two looks.
_ATTEMPTS = 5
# How long one who reads is waited for when the log is full; one who reads for ever is waited for once.
_READER_MS = 2000
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


class LogHeldUp(sqlite3.OperationalError):
    """The log is at its bound, and another process has been reading for too long to let it be shortened."""


class Database:
    """A SQLite file with a write-ahead log, which several processes may have open.

    Parameters
    ----------
    path : Path
        The file; its folder is made.
    capacity_bytes : int
        Bound of the file, its log and the log's index together, at any moment.

    Raises
    ------
    StoreError
        If the capacity is too small, or the file cannot be opened or is larger already.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        if capacity_bytes < LEAST_CAPACITY:
            raise StoreError(
                f"capacity of {capacity_bytes} bytes is too small: give at least {LEAST_CAPACITY}"
            )
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._held_up = False
        self._files = tuple(os.fspath(each) for each in (path, *beside(path)))
        self.connection = self._opened()

    @contextmanager
    def writing(self, rows: int = 1, row_bytes: int = 0) -> Iterator[sqlite3.Connection]:
        """Give a transaction that no other process writes in, all of it or nothing.

        Parameters
        ----------
        rows, row_bytes : int
            What is written at most: the log is shortened first if it might outgrow its bound.

        Raises
        ------
        LogHeldUp
            If it could not be shortened.
        """
        self._begin(self.bounds.log_of(rows, row_bytes))
        try:
            yield self.connection
            # On a full disk this, too, may fail, and leave the transaction open.
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def get(self, key: str, default: str = "") -> str:
        """Return a setting of the store."""
        row = self.connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    def settings(self) -> dict[str, str]:
        """Return all settings of the store."""
        return dict(self.connection.execute("SELECT key, value FROM meta").fetchall())

    def put(self, settings: Mapping[str, object]) -> None:
        """Keep settings, within `writing`."""
        self.connection.executemany(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
            [(key, str(value)) for key, value in settings.items()],
        )

    def used_pages(self) -> int:
        """Return how many pages of the file are in use."""
        count = self.connection.execute("PRAGMA page_count").fetchone()[0]
        return int(count) - int(self.connection.execute("PRAGMA freelist_count").fetchone()[0])

    def used_bytes(self) -> int:
        """Return what the file, its log and the log's index take on the disk."""
        return sum(map(_size, self._files))

    def is_elsewhere(self) -> bool:
        """Whether the file was renamed, replaced or deleted since it was opened."""
        return _identity(self._files[0]) != self._opened_as

    def reopen(self) -> None:
        """Open whatever is at the path now."""
        self.connection.close()
        self.connection = self._opened()

    def close(self) -> None:
        """Close the file; what was committed is in it."""
        self.connection.close()

    def put_aside(self, why: str) -> None:
        """Rename a damaged file and start a fresh one; where another process has done so, open that one's."""
        elsewhere = self.is_elsewhere()
        self.connection.close()
        if not elsewhere:
            put_aside(self.path, why)
        self.connection = self._opened()

    def _begin(self, log_bytes: int) -> None:
        for _ in range(_ATTEMPTS):
            self.connection.execute("BEGIN IMMEDIATE")
            # Looked at only now, when nobody else can make it longer.
            if _size(self._files[1]) + log_bytes <= self.bounds.log:
                return
            self.connection.execute("ROLLBACK")
            if not self._shortened():
                break
        raise LogHeldUp("the log beside it is full, and another process reads for too long")

    def _shortened(self) -> bool:
        """Write the log into the file and cut it off; return whether nobody's reading was in the way."""
        before = self.connection.execute("PRAGMA busy_timeout").fetchone()[0]
        wait = 0 if self._held_up else min(before, _READER_MS)
        self.connection.execute(f"PRAGMA busy_timeout = {wait}")
        try:
            busy = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        finally:
            self.connection.execute(f"PRAGMA busy_timeout = {before}")
        self._held_up = bool(busy)
        return not busy

    def _opened(self) -> sqlite3.Connection:
        connection = connected(self.path, page_size_for(self.capacity_bytes))
        self._opened_as = _identity(self._files[0])
        page = int(connection.execute("PRAGMA page_size").fetchone()[0])
        self.bounds = StoreBounds.of(self.capacity_bytes, page)
        count = int(connection.execute("PRAGMA page_count").fetchone()[0])
        if count > self.bounds.pages:
            connection.close()
            least = self.capacity_bytes + (count - self.bounds.pages) * page * 3 // 2
            raise StoreError(
                f"the store {self.path} takes {count * page} bytes already, too many for a capacity of "
                f"{self.capacity_bytes}: give {least}, or another file"
            )
        # Whatever may have been forgotten above, SQLite itself then refuses to let the file grow.
        connection.execute(f"PRAGMA max_page_count = {self.bounds.pages}")
        return connection


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


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
