"""Byte strings by key, in a SQLite file that one process uses at a time, or in memory."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from fl_elastic.state.files import OWNER_ONLY, private_file

if TYPE_CHECKING:
    from collections.abc import Iterator


_SETTINGS = (
    # Deleted data is overwritten, also in the journal, which is empty between two calls.
    "PRAGMA journal_mode = TRUNCATE",
    "PRAGMA secure_delete = ON",
    # Nothing is lost if the process is killed; a file damaged by a power cut is detected and made again.
    "PRAGMA synchronous = OFF",
    "PRAGMA cell_size_check = ON",
    # The lock is held from the first transaction to the end.
    "PRAGMA locking_mode = EXCLUSIVE",
)
_SCHEMA = (
    "CREATE TABLE rows(place INTEGER PRIMARY KEY, key BLOB NOT NULL, digest BLOB NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE about(digest BLOB NOT NULL)",
)
_DIGEST = 8
# Bytes of a row beside its data: key, digest, lengths and place.
_BESIDE = 48
# SQLite keeps a row in a shared page if it fits, else also in pages of its own. Larger pages waste less space of
# shared pages, but are rewritten for each small row.
_PAGE, _LARGE_PAGE = 4096, 16_384
_OF_PAGE = 36
# Pages of the schema and of the tree over the rows.
_MORE_PAGES = 8
# Largest number of values in one query of SQLite.
_AT_ONCE = 500


def page_for(row_bytes: int) -> int:
    """Return the page size that wastes the least space if many rows of this size are added at once."""
    return _LARGE_PAGE if row_bytes + _BESIDE <= _PAGE - _OF_PAGE else _PAGE


def room_of(row_bytes: int, page: int = _PAGE) -> int:
    """Return the bytes of the file that a row takes, including the unused rest of its pages.

    >>> [room_of(size, page_for(size)) for size in (100, 2048, 12288)]
    [149, 2341, 12874]
    """
    # "Database file format", section 1.6: how much of a row a leaf page keeps, and what goes to pages of its own.
    size, least, own = row_bytes + _BESIDE, (page - 12) * 32 // 255 - 23, page - 4
    here = size
    if size > page - _OF_PAGE:
        here = least + (size - least) % own
        here = here if here <= page - _OF_PAGE else least + _BESIDE
    of_leaf = (page - _OF_PAGE) // here
    return -(-page // of_leaf) + page * max(-(-(size - here) // own), 0)


def delete(path: Path) -> None:
    """Delete a file of rows that is not in use."""
    for each in (path, _journal_of(path)):
        each.unlink(missing_ok=True)


class Rows:
    """Byte strings by key; each call takes effect completely or not at all, even if the process is killed.

    Every row has a digest of its content and the subject; a row with a wrong digest is treated as missing. A file
    that is damaged, of another subject or too large is deleted and made again.

    Parameters
    ----------
    path : Path or None
        The file; it and its folder are made if missing. None to hold the rows in memory.
    subject : bytes
        Subject of all rows, such as the digest of a model. Rows of another subject are deleted.
    most : int
        Largest size of the file in bytes, not counting some pages for its structure.
    page : int
        Page size of a new file.

    Attributes
    ----------
    places : dict of bytes to int
        Place of the row of each key, in the order in which rows were added.

    Raises
    ------
    BlockingIOError
        If another process uses the file.
    OSError
        If the file cannot be made.

    Examples
    --------
    >>> rows = Rows(None, b"weights of today", most=2**20)
    >>> rows.add([(b"a", b"one"), (b"b", b"two")])
    >>> rows.read([b"b", b"c", b"a"])
    [b'two', None, b'one']
    >>> rows.remove([b"a"]); list(rows.places)
    [b'b']
    >>> rows.close()
    """

    def __init__(
        self,
        path: Path | None,
        subject: bytes,
        *,
        most: int,
        page: int = _PAGE,
    ) -> None:
        self._path, self._subject = path, blake2b(subject).digest()
        self._page, self._pages = page, most // page + _MORE_PAGES
        self._proved: set[bytes] = set()
        with _as_os_errors():
            self._connection, self.places = self._opened()
        self._last = max(self.places.values(), default=0)

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the data of each key; None for a missing key."""
        wanted = [self.places[key] for key in keys if key in self.places]
        found: dict[bytes, bytes] = {}
        with suppress(sqlite3.DatabaseError):
            for start in range(0, len(wanted), _AT_ONCE):
                some = wanted[start : start + _AT_ONCE]
                query = f"SELECT key, digest, data FROM rows WHERE place IN ({','.join('?' * len(some))})"
                for key, digest, data in self._connection.execute(query, some):
                    if key in self._proved or digest == self._digest(key, data):
                        found[key] = data
        self._proved.update(found)
        return [found.get(key) for key in keys]

    def add(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Add rows with new keys, all of them or none.

        Raises
        ------
        OSError
            If the disk refuses them, or the file would exceed its bound.
        """
        places = {key: self._last + i for i, (key, _) in enumerate(rows, 1)}
        written = [(places[key], key, self._digest(key, data), data) for key, data in rows]
        with _as_os_errors(), self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany("INSERT INTO rows VALUES (?, ?, ?, ?)", written)
        self.places |= places
        self._proved.update(places)
        self._last += len(rows)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete and overwrite the rows of these keys; OSError if the disk does not permit it."""
        gone = [(self.places[key],) for key in keys if key in self.places]
        if not gone:
            return
        with _as_os_errors(), self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany("DELETE FROM rows WHERE place = ?", gone)
        for key in keys:
            self.places.pop(key, None)
        self._proved.difference_update(keys)

    def close(self) -> None:
        """Close the file, or free the memory."""
        if self._path is not None:
            # The journal is empty, and no other process uses it while the file is locked.
            _journal_of(self._path).unlink(missing_ok=True)
        self._connection.close()

    def _digest(self, key: object, data: object) -> bytes:
        if not isinstance(key, bytes) or not isinstance(data, bytes):
            return b""
        return blake2b(key + data, digest_size=_DIGEST, key=self._subject).digest()

    def _opened(self) -> tuple[sqlite3.Connection, dict[bytes, int]]:
        if self._path is None:
            return self._made(sqlite3.connect(":memory:", isolation_level=None)), {}
        if self._path.exists():
            with suppress(PermissionError):
                self._path.chmod(OWNER_ONLY)
            connection = self._connected(self._path)
            try:
                if (places := self._found(connection)) is not None:
                    return connection, places
            except sqlite3.DatabaseError as error:
                # A damaged file may also look read-only, or like that of a later SQLite.
                if _code_of(error) == sqlite3.SQLITE_BUSY:
                    connection.close()
                    raise
            connection.close()
            delete(self._path)
        os.close(private_file(self._path, os.O_RDWR))
        connection = self._connected(self._path)
        try:
            return self._made(connection), {}
        except BaseException:
            connection.close()
            delete(self._path)
            raise

    def _connected(self, path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)

    def _found(self, connection: sqlite3.Connection) -> dict[bytes, int] | None:
        """Return the place of each row; None if the file has another subject or is too large."""
        self._set_up(connection)
        with connection:
            connection.execute("BEGIN EXCLUSIVE")
            if connection.execute("PRAGMA page_count").fetchone()[0] > self._pages:
                return None
            tables = "SELECT count(*) FROM sqlite_master WHERE sql IN (?, ?)"
            if connection.execute(tables, _SCHEMA).fetchone()[0] != len(_SCHEMA):
                return None
            if connection.execute("SELECT digest FROM about").fetchall() != [(self._subject,)]:
                return None
            # A write fails here if the file is read-only; such a file would refuse all additions.
            connection.execute("UPDATE about SET digest = digest")
            found = connection.execute("SELECT key, place FROM rows ORDER BY place").fetchall()
        return {key: place for key, place in found if isinstance(key, bytes)}

    def _made(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        """Make the tables in an empty file."""
        connection.execute(f"PRAGMA page_size = {self._page}")
        self._set_up(connection)
        with connection:
            connection.execute("BEGIN EXCLUSIVE")
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO about VALUES (?)", (self._subject,))
        return connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        for setting in (*_SETTINGS, f"PRAGMA max_page_count = {self._pages}"):
            with closing(connection.execute(setting)) as cursor:
                cursor.fetchall()


def _journal_of(path: Path) -> Path:
    return path.with_name(path.name + "-journal")


def _code_of(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise errors of SQLite as the corresponding OSError."""
    try:
        yield
    except sqlite3.Error as error:
        code = _code_of(error)
        if code == sqlite3.SQLITE_BUSY:
            raise BlockingIOError(errno.EAGAIN, "another process uses it") from None
        number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
        raise OSError(
            number, os.strerror(number) if number == errno.ENOSPC else str(error)
        ) from None
