"""The SQLite file under a sample store: tables, transactions within its bound, recovery from damage."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fl_elastic.errors import StoreError
from fl_elastic.streaming.aside import put_aside
from fl_elastic.streaming.store.bounds import LEAST_CAPACITY, StoreBounds, page_size_for

__all__ = ["Database", "is_damage"]

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
_ONE_MORE = "INSERT INTO classes VALUES (NEW.y, 1) ON CONFLICT(y) DO UPDATE SET n = n + 1;"
_ONE_LESS = "UPDATE classes SET n = n - 1 WHERE y = OLD.y;"
_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    # A killed process loses nothing that was committed; a power cut perhaps the last commits, never the file.
    "PRAGMA synchronous = NORMAL",
    # Some builds would write zeros over all that leaves: twice the bytes, and more than the log's bound foresees.
    "PRAGMA secure_delete = FAST",
    # It is shortened by hand, see `Database.writing`.
    "PRAGMA wal_autocheckpoint = 0",
    # Nothing lies on the disk besides what is counted.
    "PRAGMA temp_store = MEMORY",
)
# They count samples by class as rows come and go; of this connection alone, so that the file is as it always was.
_COUNTING = (
    f"CREATE TEMP TRIGGER came AFTER INSERT ON samples BEGIN {_ONE_MORE} END",
    f"CREATE TEMP TRIGGER went AFTER DELETE ON samples BEGIN {_ONE_LESS} END",
    f"CREATE TEMP TRIGGER labelled AFTER UPDATE OF y ON samples BEGIN {_ONE_LESS} {_ONE_MORE} END",
)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the file itself is damaged, rather than busy, full or unreachable."""
    # Other failures mostly have classes of their own; what `_check` finds has no code.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return type(error) is sqlite3.DatabaseError and code & 0xFF in _DAMAGE


class Database:
    """A SQLite file within its bound, with a write-ahead log; several processes may have it open."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        if capacity_bytes < LEAST_CAPACITY:
            raise StoreError(
                f"capacity of {capacity_bytes} bytes is too small: give at least {LEAST_CAPACITY}"
            )
        self.path, self.capacity_bytes = path, capacity_bytes
        self._held_up = False
        self._files = tuple(os.fspath(path) + end for end in ("", "-wal", "-shm"))
        self.open()

    def open(self, damage: str = "") -> None:
        """Open what is at the path, made if it is not there; a damaged file is put aside and made anew.

        Raises
        ------
        StoreError
            If it cannot be opened, is somebody else's, or is larger than the capacity already.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if damage:
                self._put_aside(damage)
            try:
                self.connection = self._connected()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                self._put_aside(str(error))
                self.connection = self._connected()
        except (OSError, sqlite3.Error, StoreError) as error:
            raise StoreError(f"cannot open the sample store {self.path}: {error}") from None
        self._opened_as = _identity(self._files[0])

    def reopen(self, damage: str = "") -> None:
        """Open it again; it is only put aside if nobody else has put another file there already."""
        damage = "" if self.is_elsewhere() else damage
        self.connection.close()
        self.open(damage)

    def is_elsewhere(self) -> bool:
        """Whether the file was renamed, replaced or deleted since it was opened."""
        return _identity(self._files[0]) != self._opened_as

    @contextmanager
    def writing(
        self, rows: int = 1, row_bytes: int = 0, leaving: int = 1
    ) -> Iterator[sqlite3.Connection]:
        """Give a transaction that no other process writes in, all of it or nothing, for so many rows at most.

        The log is shortened first if it might outgrow its bound: OperationalError if somebody reads for too long.
        """
        self._begin(self.bounds.log_of(rows, row_bytes, leaving))
        with self.connection:
            yield self.connection

    def notes(self) -> dict[str, str]:
        """Return all that is written down beside the samples."""
        return dict(self.connection.execute("SELECT key, value FROM meta").fetchall())

    def note(self, facts: Mapping[str, object]) -> None:
        """Write facts down, within `writing`."""
        self.connection.executemany(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
            [(key, str(value)) for key, value in facts.items()],
        )

    def compact(self) -> None:
        """Write the file anew, without what was deleted from it, and cut the log off.

        Raises
        ------
        sqlite3.Error
            If another process is in the way, or the disk is full.
        """
        self.connection.execute("VACUUM")
        if not self._shortened():
            raise sqlite3.OperationalError("another process reads for too long")

    def used_pages(self) -> int:
        """Return how many pages of the file are in use."""
        return _number(self.connection, "page_count") - _number(self.connection, "freelist_count")

    def used_bytes(self) -> int:
        """Return what the file, its log and the log's index take on the disk."""
        return sum(map(_size, self._files))

    def _begin(self, log_bytes: int) -> None:
        for _ in range(_ATTEMPTS):
            self.connection.execute("BEGIN IMMEDIATE")
            # Looked at only now, when nobody else can make it longer.
            if _size(self._files[1]) + log_bytes <= self.bounds.log:
                return
            self.connection.execute("ROLLBACK")
            if not self._shortened():
                break
        raise sqlite3.OperationalError(
            "the log beside it is full, and another process reads for too long"
        )

    def _shortened(self) -> bool:
        """Write the log into the file and cut it off; return whether nobody's reading was in the way."""
        before = _number(self.connection, "busy_timeout")
        wait = 0 if self._held_up else min(before, _READER_MS)
        self.connection.execute(f"PRAGMA busy_timeout = {wait}")
        try:
            self._held_up = bool(_number(self.connection, "wal_checkpoint(TRUNCATE)"))
        finally:
            self.connection.execute(f"PRAGMA busy_timeout = {before}")
        return not self._held_up

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection, page_size_for(self.capacity_bytes))
            page, count = _number(connection, "page_size"), _number(connection, "page_count")
            self.bounds = StoreBounds(self.capacity_bytes, page)
            if count > self.bounds.pages:
                least = self.capacity_bytes + (count - self.bounds.pages) * page * 3 // 2
                raise StoreError(
                    f"it takes {count * page} bytes already, too many for a capacity of {self.capacity_bytes}: "
                    f"give {least}, or another file"
                )
            # Whatever may have been forgotten above, SQLite itself then refuses to let the file grow.
            connection.execute(f"PRAGMA max_page_count = {self.bounds.pages}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _put_aside(self, why: str) -> None:
        try:
            aside = put_aside(self.path)
        except OSError as error:
            raise StoreError(f"it is damaged ({why}) and cannot be put aside: {error}") from None
        _LOG.error(
            "the sample store %s is damaged (%s): it was put aside as %s, and a fresh one is started",
            self.path, why, aside.name,
        )  # fmt: skip


def _prepare(connection: sqlite3.Connection, page_size: int) -> None:
    """Set the connection up and make the tables; raise sqlite3.DatabaseError where the file is damaged."""
    tables = _tables(connection)
    if tables and not tables & _TABLES:
        # Somebody's file, and none of ours: left as it is.
        named = ", ".join(sorted(tables)[:3])
        raise StoreError(f"it is no sample store, but a database with {named}")
    for statement in (f"PRAGMA page_size = {page_size}", *_SETTINGS, "BEGIN IMMEDIATE"):
        connection.execute(statement)
    with connection:
        if tables := _tables(connection):
            _check(connection, tables)
        else:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('format', ?)", (_FORMAT,))
        for statement in _COUNTING:
            connection.execute(statement)


def _check(connection: sqlite3.Connection, tables: set[str]) -> None:
    if not _TABLES <= tables:
        raise sqlite3.DatabaseError(f"it has the tables {sorted(tables)}, not those of a store")
    row = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if row is None or row[0] != _FORMAT:
        raise sqlite3.DatabaseError(f"its format is {row and row[0]}, not {_FORMAT}")
    answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if answer != "ok":
        raise sqlite3.DatabaseError(str(answer))


def _tables(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {str(row[0]) for row in rows}


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


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
