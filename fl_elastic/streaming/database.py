"""The file under a sample store: opened, bounded, and put aside when it is damaged."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_elastic.errors import StoreError

__all__ = ["LEAST_CAPACITY", "Database", "is_damage"]

_LOG = logging.getLogger("fl_elastic")
_FORMAT = "1"
LEAST_CAPACITY = 64 * 1024
"""Bytes below which the file's own structure would be most of it."""

_SHARE_OF_LOG = 4
_BUSY_SECONDS = 30.0
# Pages that indices may need while they are rearranged.
_SPARE_PAGES = 12
# Pages that placing a row may touch besides its own: of the table, three indices, two counters, and their splits.
_PAGES_BESIDE_ROW = 7
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


class Database:
    """A SQLite file with a write-ahead log, which several processes may have open.

    Parameters
    ----------
    path : Path
        The file; its folder is made.
    capacity_bytes : int
        Bound of the file and its log together.

    Raises
    ------
    StoreError
        If the capacity is too small or the file cannot be opened.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        if capacity_bytes < LEAST_CAPACITY:
            raise StoreError(
                f"capacity of {capacity_bytes} bytes is too small: give at least {LEAST_CAPACITY}"
            )
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.connection = self._opened()
        self._page = int(self.connection.execute("PRAGMA page_size").fetchone()[0])

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Give a transaction that no other process writes in, all of it or nothing."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def get(self, key: str, default: str = "") -> str:
        """Return a setting of the store."""
        row = self.connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    def put(self, key: str, value: object) -> None:
        """Keep a setting, within `writing`."""
        self.connection.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
            (key, str(value)),
        )

    def has_room(self, row_bytes: int) -> bool:
        """Whether one more row of this size fits into the bound."""
        pages = int(self.connection.execute("PRAGMA page_count").fetchone()[0])
        free = int(self.connection.execute("PRAGMA freelist_count").fetchone()[0])
        needed = row_bytes // (self._page - 4) + 2 + _SPARE_PAGES
        return (pages - free + needed) * self._page <= self.capacity_bytes - self._log_bytes

    def rows_per_transaction(self, row_bytes: int) -> int:
        """Return how many rows of this size fit into half of the log, at least one."""
        pages = _PAGES_BESIDE_ROW + row_bytes // (self._page - 4) + 1
        return max(self._log_bytes // 2 // (pages * (self._page + 24)), 1)

    def shorten_log(self) -> None:
        """Write the log into the file and cut it off once it is half of its bound; a reader at work is let be."""
        try:
            long = self._beside()[0].stat().st_size > self._log_bytes // 2
        except FileNotFoundError:
            return
        if long:
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def used_bytes(self) -> int:
        """Return what the file and its log take on the disk."""
        files = (self.path, *self._beside())
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Close the file; what was committed is in it."""
        self.connection.close()

    def put_aside(self, why: str) -> Path:
        """Rename a damaged file, start a fresh one, say so, and return where the damaged one is."""
        self.connection.close()
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        _put_aside(self.path, aside, why)
        self.connection = self._opened()
        return aside

    @property
    def _log_bytes(self) -> int:
        return self.capacity_bytes // _SHARE_OF_LOG

    def _beside(self) -> tuple[Path, Path]:
        return (
            self.path.with_name(f"{self.path.name}-wal"),
            self.path.with_name(f"{self.path.name}-shm"),
        )

    def _opened(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._connected()
        except (OSError, StoreError, sqlite3.OperationalError) as error:
            raise StoreError(f"cannot open the sample store {self.path}: {error}") from None
        except sqlite3.DatabaseError as error:
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
                number += 1
            _put_aside(self.path, aside, str(error))
            connection = self._connected()
        return connection

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection, _page_size(self.capacity_bytes), self._log_bytes)
        except BaseException:
            connection.close()
            raise
        return connection


def _page_size(capacity_bytes: int) -> int:
    """Return the size of a new file's pages: small where a few of them would be all there is."""
    return 512 if capacity_bytes < 2**20 else 1024 if capacity_bytes < 2**23 else 4096


def _prepare(connection: sqlite3.Connection, page_size: int, log_bytes: int) -> None:
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
    connection.execute(f"PRAGMA journal_size_limit = {log_bytes}")
    # It is shortened by hand, see `Database.shorten_log`.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("BEGIN IMMEDIATE")
    try:
        tables = {
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        }
        if not tables:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('format', ?)", (_FORMAT,))
        else:
            _check(connection, tables)
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


def _put_aside(path: Path, aside: Path, why: str) -> None:
    for ending in ("", "-wal", "-shm"):
        found = path.with_name(path.name + ending)
        if found.exists():
            found.rename(aside.with_name(aside.name + ending))
    _LOG.error(
        "the sample store %s is damaged (%s): it was put aside as %s, and a fresh one is started",
        path, why, aside.name,
    )  # fmt: skip
