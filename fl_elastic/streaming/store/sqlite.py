"""The SQLite file of a sample store: tables, bounded transactions, and a new file in place of a damaged one."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fl_elastic.errors import StoreError
from fl_elastic.state.files import private_file
from fl_elastic.streaming.quarantine import quarantine
from fl_elastic.streaming.store.bounds import (
    LEAST_CAPACITY,
    RowsToWrite,
    StoreBounds,
    page_size_for,
)
from fl_elastic.streaming.store.encoding import Encoding

_LOG = logging.getLogger("fl_elastic")
_Found = TypeVar("_Found")
# Most attempts to begin a transaction: another process may fill the log between two of them.
_ATTEMPTS = 5
# Milliseconds to wait for a reader when the log is full; for a reader that never ends, this is done only once.
_READER_MS = 2000
_BUSY_SECONDS = 30.0
_FORMAT = "2"
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TABLES = {"meta", "samples", "classes"}
_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE samples(
    slot INTEGER PRIMARY KEY, id INTEGER NOT NULL, y INTEGER NOT NULL, draw REAL NOT NULL,
    version TEXT NOT NULL, x BLOB NOT NULL);
CREATE TABLE classes(y INTEGER PRIMARY KEY, n INTEGER NOT NULL);
CREATE UNIQUE INDEX by_id ON samples(id);
CREATE INDEX by_draw ON samples(draw);
CREATE INDEX by_class ON samples(y, draw);
"""
_ONE_MORE = "INSERT INTO classes VALUES (NEW.y, 1) ON CONFLICT(y) DO UPDATE SET n = n + 1;"
_ONE_LESS = "UPDATE classes SET n = n - 1 WHERE y = OLD.y;"
_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    # A killed process loses nothing that was committed. A power cut may lose the last commits, but never the file.
    "PRAGMA synchronous = NORMAL",
    # Some builds of SQLite would overwrite all deleted rows with zeros: twice the bytes, beyond the log's bound.
    "PRAGMA secure_delete = FAST",
    # The log is emptied explicitly, see `Database.write`.
    "PRAGMA wal_autocheckpoint = 0",
    # Temporary files would not be counted in the bound.
    "PRAGMA temp_store = MEMORY",
)
# Triggers that count samples by class. They belong to this connection only, so that the file's schema is unchanged.
_COUNTING = (
    f"CREATE TEMP TRIGGER came AFTER INSERT ON samples BEGIN {_ONE_MORE} END",
    f"CREATE TEMP TRIGGER went AFTER DELETE ON samples BEGIN {_ONE_LESS} END",
    f"CREATE TEMP TRIGGER labelled AFTER UPDATE OF y ON samples BEGIN {_ONE_LESS} {_ONE_MORE} END",
)


@dataclass
class Facts:
    """Facts stored with the samples: number seen, last id, number rejected by reason, and encoding."""

    seen: int
    last: int
    rejected: Counter[str]
    form: Encoding | None

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Facts:
        """Read the result of `to_texts`; raise sqlite3.DatabaseError if it is anything else."""
        try:
            seen, last = (int(texts.get(key, "0")) for key in ("seen", "last_id"))
            rejected = json.loads(texts.get("rejected", "{}")).items()
            form = Encoding.from_json(texts["encoding"]) if "encoding" in texts else None
            return cls(seen, last, Counter({str(why): int(n) for why, n in rejected}), form)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise sqlite3.DatabaseError(f"its description of the samples: {error}") from None

    def to_texts(self) -> dict[str, str]:
        """Return the facts as texts by key; facts that do not exist are left out."""
        texts = {"seen": str(self.seen), "last_id": str(self.last)}
        if self.rejected:
            texts["rejected"] = json.dumps(self.rejected)
        return texts | ({"encoding": self.form.to_json()} if self.form else {})


class Database:
    """A SQLite file with a bound and a write-ahead log; several processes may have it open.

    A damaged file is renamed, and a new one made with the same settings. `lost` counts damaged files and samples
    that could not be written, by reason.
    """

    def __init__(self, path: Path, capacity_bytes: int, settings: Mapping[str, str]) -> None:
        if capacity_bytes < LEAST_CAPACITY:
            raise StoreError(
                f"capacity of {capacity_bytes} bytes is too small: give at least {LEAST_CAPACITY}"
            )
        self.path, self.capacity_bytes, self._settings = path, capacity_bytes, settings
        self.lost: Counter[str] = Counter()
        self._failures, self._held_up = 0, False
        self._files = tuple(os.fspath(path) + end for end in ("", "-wal", "-shm"))
        # A placeholder until the file is opened.
        self.connection = sqlite3.connect(":memory:")
        # A transaction belongs to the connection: another thread's writes would end up in it, or fail.
        self._one_thread = threading.RLock()
        self._opened_as: tuple[int, int] | None = None
        self.look(lambda: None)

    def look(self, action: Callable[[], _Found]) -> _Found:
        """Run an action that only reads; raise StoreError if the file cannot be read."""
        try:
            return self._tried(action)
        except sqlite3.Error as error:
            raise StoreError(f"cannot read {self.path}: {error}") from None

    def read(self, query: str, *values: object) -> list[Any]:
        """Return the rows of a query; raise StoreError if they cannot be read."""
        return self.look(lambda: self.connection.execute(query, values).fetchall())

    def facts(self) -> Facts:
        """Return the facts that the file holds now; another process may have added samples."""
        return self.look(lambda: Facts.of(texts_of(self.connection)))

    def write(self, action: Callable[[], _Found], what: str, rows: RowsToWrite) -> _Found | None:
        """Run an action as an exclusive transaction that writes at most these rows; return its result.

        The log is emptied first if it might outgrow its bound. If the transaction cannot be written, this is logged
        and the result is None.
        """

        def whole() -> _Found:
            self._begin(self.bounds.log_of(rows))
            with self.connection:
                return action()

        try:
            return self._tried(whole)
        except sqlite3.DatabaseError as error:
            self._failures += 1
            # A disk may stay full for long: log only the first failure, the second, the fourth, ...
            if self._failures.bit_count() == 1:
                said = f"{what} could not be written to {self.path}: {error}"
                _LOG.warning("%s (failure %s)", said, self._failures)
            return None

    def compact(self) -> None:
        """Rewrite the file without deleted content; raise sqlite3.Error if that is not possible."""
        with self._one_thread:
            self.connection.execute("VACUUM")
            if not self._shortened():
                raise sqlite3.OperationalError("another process reads for too long")

    def state(self) -> tuple[object, ...]:
        """Return a value that changes whenever the samples may have changed."""
        writes_of_others = self.read("PRAGMA data_version")[0][0]
        return self.connection, self.connection.total_changes, writes_of_others

    def used_pages(self) -> int:
        """Return the number of pages of the file in use."""
        return _number(self.connection, "page_count") - _number(self.connection, "freelist_count")

    def used_bytes(self) -> int:
        """Return the bytes of the file, its log and the log's index on the disk."""
        return sum(map(_size, self._files))

    def quarantine(self, damage: str) -> None:
        """Rename the damaged file; a new one is made when it is needed."""
        self.lost["file was damaged"] += 1
        self.connection.close()
        try:
            aside = quarantine(self.path)
        except OSError as error:
            raise StoreError(
                f"the sample store {self.path} is damaged ({damage}) and cannot be put aside: {error}"
            ) from None
        _LOG.error(
            "the sample store %s is damaged (%s): it was put aside as %s, and a new one is started",
            self.path, damage, aside.name,
        )  # fmt: skip
        self._opened_as = None

    def _tried(self, action: Callable[[], _Found]) -> _Found:
        """Run an action while no other thread does, on a new file if this one is damaged."""
        with self._one_thread:
            here = _identity(self._files[0])
            try:
                return self._opened(action)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                # Another process may have renamed the file by now.
                if _identity(self._files[0]) == here:
                    self.quarantine(str(error))
            return self._opened(action)

    def _opened(self, action: Callable[[], _Found]) -> _Found:
        """Run an action on the file that is at the path now; open it again if it was replaced."""
        if self._opened_as is None or self._opened_as != _identity(self._files[0]):
            if self._opened_as:
                # Another process has renamed the file, or a user has deleted it.
                _LOG.warning("the sample store %s was replaced: opened anew", self.path)
            self._open()
        return action()

    def _open(self) -> None:
        """Open the file at the path, or make it; raise sqlite3.DatabaseError if it is damaged."""
        self.connection.close()
        try:
            # SQLite gives the log and its index the permissions of the file.
            os.close(private_file(self.path, os.O_RDWR))
            connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                _prepare(connection, page_size_for(self.capacity_bytes), self._settings)
                self.bounds = self._bounds(connection)
            except BaseException:
                connection.close()
                raise
        except (OSError, sqlite3.Error, StoreError) as error:
            if isinstance(error, sqlite3.Error) and _is_damage(error):
                raise
            raise StoreError(f"cannot open the sample store {self.path}: {error}") from None
        self.connection, self._opened_as = connection, _identity(self._files[0])

    def _bounds(self, connection: sqlite3.Connection) -> StoreBounds:
        page, count = _number(connection, "page_size"), _number(connection, "page_count")
        bounds = StoreBounds(self.capacity_bytes, page)
        if count > bounds.pages:
            least = self.capacity_bytes + (count - bounds.pages) * page * 3 // 2
            raise StoreError(
                f"it takes {count * page} bytes already, too many for a capacity of {self.capacity_bytes}: "
                f"give {least}, or another file"
            )
        # A safeguard: beyond this, SQLite itself refuses to let the file grow.
        connection.execute(f"PRAGMA max_page_count = {bounds.pages}")
        return bounds

    def _begin(self, log_bytes: int) -> None:
        for _ in range(_ATTEMPTS):
            self.connection.execute("BEGIN IMMEDIATE")
            # Checked within the transaction, when no other process can add to the log.
            if _size(self._files[1]) + log_bytes <= self.bounds.log:
                return
            self.connection.execute("ROLLBACK")
            if not self._shortened():
                break
        raise sqlite3.OperationalError(
            "the log beside it is full, and another process reads for too long"
        )

    def _shortened(self) -> bool:
        """Write the log into the file and empty it; return whether readers permitted that."""
        before = _number(self.connection, "busy_timeout")
        wait = 0 if self._held_up else min(before, _READER_MS)
        self.connection.execute(f"PRAGMA busy_timeout = {wait}")
        try:
            self._held_up = bool(_number(self.connection, "wal_checkpoint(TRUNCATE)"))
        finally:
            self.connection.execute(f"PRAGMA busy_timeout = {before}")
        return not self._held_up


def texts_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Return all texts that are stored beside the samples, by key."""
    return dict(connection.execute("SELECT key, value FROM meta").fetchall())


def note(connection: sqlite3.Connection, texts: Mapping[str, object]) -> None:
    """Write texts beside the samples."""
    connection.executemany(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
        [(key, str(value)) for key, value in texts.items()],
    )


def _is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error means that the file itself is damaged, rather than busy, full or unreachable."""
    # Most other failures have their own classes; errors raised by this module have no code.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return type(error) is sqlite3.DatabaseError and code & 0xFF in _DAMAGE


def _prepare(connection: sqlite3.Connection, page_size: int, settings: Mapping[str, str]) -> None:
    """Set the connection up and make the tables; raise sqlite3.DatabaseError if the file is damaged."""
    # Invalid characters are replaced here; they are rejected wherever a value matters.
    connection.text_factory = lambda data: data.decode(errors="replace")
    tables = _tables(connection)
    if tables and not tables & _TABLES:
        # The file of another program is left unchanged.
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
            note(connection, {"format": _FORMAT})
        for statement in _COUNTING:
            connection.execute(statement)
        made = texts_of(connection)
        if not settings.keys() & made.keys():
            note(connection, settings)
        elif other := [
            f"{key.removesuffix('_name')} {made.get(key)}"
            for key in settings
            if made.get(key) != settings[key]
        ]:
            raise StoreError(
                f"it was made with {', '.join(other)}: open it with that, or use another file"
            )


def _check(connection: sqlite3.Connection, tables: set[str]) -> None:
    if not _TABLES <= tables:
        raise sqlite3.DatabaseError(f"it has the tables {sorted(tables)}, not those of a store")
    texts = texts_of(connection)
    if texts.get("format") != _FORMAT:
        raise sqlite3.DatabaseError(f"its format is {texts.get('format')}, not {_FORMAT}")
    answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if answer != "ok":
        raise sqlite3.DatabaseError(str(answer))
    Facts.of(texts)


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
