"""A store's file as the store uses it, and what may be drawn from it: damage, full disks, other processes."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StoreError
from fl_elastic.streaming.database import Database, is_damage
from fl_elastic.streaming.deletion import Condition, delete_some
from fl_elastic.streaming.encoding import ENCODINGS, Encoding
from fl_elastic.streaming.placing import Placing, Written, as_array, extra_bytes
from fl_elastic.streaming.storage_policies import STORAGE_POLICIES
from fl_elastic.streaming.stored import Change, Offer, Placed, Relabelled

__all__ = ["Drawable", "Note", "Read", "StoreFile"]

_LOG = logging.getLogger("fl_elastic")
_Found = TypeVar("_Found")
Note: TypeAlias = Callable[[Sequence[Change]], Mapping[str, object]]
Read = Callable[[str, Sequence[object]], list[Any]]
"""``(query, values)`` to rows."""
Table = tuple[NDArray[np.int64], NDArray[np.int64]]


def _no_note(_: Sequence[Change]) -> Mapping[str, object]:
    return {}


class StoreFile:
    """The file of a store.

    Parameters
    ----------
    path : Path
        Where.
    capacity_bytes : int
        Bound of all that it takes on the disk.
    policy, encoding, seed : str, str, int
        What it is made with; see `SampleStore`.

    Attributes
    ----------
    drawable : Drawable
        Its index in memory.
    lost : Counter
        What could not be written, by reason.

    Raises
    ------
    StoreError
        If it cannot be opened or was made with other settings.
    """

    def __init__(
        self, path: Path, capacity_bytes: int, policy: str, encoding: str, seed: int
    ) -> None:
        if encoding not in ENCODINGS:
            raise StoreError(f"encoding {encoding!r} is unknown: known are {', '.join(ENCODINGS)}")
        self._policy = STORAGE_POLICIES.make(policy)
        self._settings = {"policy": policy, "encoding_name": encoding, "seed": str(seed)}
        self._seed, self._encoding_name = seed, encoding
        self._form: Encoding | None = None
        self._failures = 0
        self.lost: Counter[str] = Counter()
        self.drawable = Drawable(self.read)
        self.database = Database(path, capacity_bytes)
        self._settle()

    @property
    def form(self) -> Encoding | None:
        """Shape, type and form on disk of every sample; None before the first."""
        if self._form is None:
            rows = self.read("SELECT value FROM meta WHERE key = 'encoding'")
            self._form = Encoding.from_json(rows[0][0]) if rows else None
        return self._form

    @property
    def rejected(self) -> Counter[str]:
        """Samples that made no sense or could not be written, by reason."""
        rows = self.read("SELECT value FROM meta WHERE key = 'rejected'")
        return Counter(json.loads(rows[0][0]) if rows else {}) + self.lost

    def read(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Return rows; none where the file turns out to be damaged, and a fresh one is started.

        Raises
        ------
        StoreError
            If the file cannot be read, such as one that is closed.
        """
        try:
            self._follow()
            return self.database.connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            if not isinstance(error, sqlite3.DatabaseError) or not is_damage(error):
                raise StoreError(f"cannot read {self.database.path}: {error}") from None
            self._start_afresh(str(error))
            return []

    def change(
        self, changes: Sequence[Change], version: str, note: Note = _no_note
    ) -> list[Placed]:
        """Make changes, so many at a time that the log keeps to its bound; say what became of each.

        Parameters
        ----------
        changes : sequence of Change
            In the order of the stream.
        version : str
            What samples belong to.
        note : callable
            Told which changes are left after those of a transaction, says what is written with these.
        """
        placed: list[Placed] = []
        extra = max(map(self._beside, changes), default=0)
        while len(placed) < len(changes):
            # The first sample alone decides what the others look like.
            first = changes[len(placed)]
            size = extra
            if self._form:
                size += self._form.row_bytes
            elif isinstance(first, Offer):
                size += as_array(first.x).nbytes
            many = self.database.bounds.rows_per_transaction(size) if self._form else 1
            end = len(placed) + max(many, 1)
            some, told = changes[len(placed) : end], note(changes[end:])
            written = self._tried(
                partial(self._written, some, size, version, told), f"{len(some)} samples"
            )
            if written is None:
                self.lost["disk"] += len(some)
            placed += written or [Placed(None, False)] * len(some)
        return placed

    def label(self, sample_id: int, y: int) -> bool:
        """Give a sample its label; return whether it is here."""
        # Looked at first, so that a foreign id costs no transaction.
        here = self.read("SELECT 1 FROM samples WHERE id = ?", (sample_id,))
        return bool(here) and self.change([Relabelled(sample_id, y)], "")[0].kept

    def delete(self, condition: Condition) -> int:
        """Delete samples; return how many. One that is killed may have deleted a part of them."""
        gone, more = 0, True
        while more:
            # A form that is not known yet means an empty store.
            size = 0 if self.form is None else self.form.row_bytes
            found = self._tried(partial(delete_some, self.database, condition, size), "a deletion")
            count, more = found or (0, False)
            gone += count
        self.drawable.changed()
        return gone

    def close(self) -> None:
        """Close it; what was committed is in it."""
        self.database.close()

    def _beside(self, change: Change) -> int:
        """Return the bytes that outputs take beside the sample that a change writes."""
        if isinstance(change, Offer):
            return extra_bytes(change.outputs)
        # SQLite writes the whole row anew for another label.
        query = "SELECT COALESCE(LENGTH(outputs), 0) FROM samples WHERE id = ?"
        rows = self.read(query, (change.number,))
        return int(rows[0][0]) if rows else 0

    def _written(
        self, changes: Sequence[Change], size: int, version: str, told: Mapping[str, object]
    ) -> list[Placed]:
        database, form = self.database, self._form or self._encoding_name
        if not database.bounds.rows_per_transaction(size):
            # It is refused, so that nothing of it is written.
            size = 0
        with database.writing(len(changes), size):
            written: Written = Placing(database, self._policy, form, self._seed, version).place(
                changes
            )
            if told:
                database.put(told)
        for reason, count in written.refused.items():
            _LOG.warning("%s samples rejected: %s", count, reason)
        self._form = written.encoding
        self.drawable.changed()
        return list(written.placed)

    def _tried(self, action: Callable[[], _Found], what: str) -> _Found | None:
        """Do it, on a fresh file where this one is damaged; None where the disk does not take it."""
        for again in (True, False):
            try:
                self._follow()
                return action()
            except sqlite3.DatabaseError as error:
                if is_damage(error) and again:
                    self._start_afresh(str(error))
                    continue
                self._failed(error, what)
                return None
        return None

    def _failed(self, error: sqlite3.DatabaseError, what: str) -> None:
        self._failures += 1
        # A disk may stay full for long: said the first time, the second, the fourth, ...
        if self._failures & (self._failures - 1) == 0:
            _LOG.warning(
                "%s could not be written to %s: %s (failure %s)",
                what, self.database.path, error, self._failures,
            )  # fmt: skip

    def _follow(self) -> None:
        """Open anew what is at the path, if another process has put the file aside or somebody deleted it."""
        if self.database.is_elsewhere():
            _LOG.warning("the sample store %s was replaced: opened anew", self.database.path)
            self.database.reopen()
            self._begin()

    def _start_afresh(self, why: str) -> None:
        self.database.put_aside(why)
        self.lost["file was damaged"] += 1
        self._begin()

    def _begin(self) -> None:
        self._form = None
        self.drawable.forget()
        self._settle()

    def _settle(self) -> None:
        """Take over what the file was made with; write it into a fresh one."""
        database = self.database
        kept = {key: database.get(key) for key in self._settings}
        if not any(kept.values()):
            with database.writing():
                database.put(self._settings)
        elif kept != self._settings:
            different = [key for key in kept if kept[key] != self._settings[key]]
            database.close()
            raise StoreError(
                f"the store {database.path} was made with "
                + ", ".join(f"{key} {kept[key]}" for key in different)
                + "; open it with that, or use another file"
            )
        text = database.get("encoding")
        try:
            self._form = Encoding.from_json(text) if text else None
        except StoreError as error:
            self._start_afresh(str(error))


class Drawable:
    """What can be drawn from a store's file.

    Parameters
    ----------
    read : callable
        Asks the file.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._own_writes = 0
        self._known: tuple[object, Table] | None = None

    def changed(self) -> None:
        """Say that this process has written; writes of others are noticed."""
        self._own_writes += 1

    def forget(self) -> None:
        """Read everything again: it is another file."""
        self._known = None

    def table(self, labelled: bool, version: str | None) -> Table:
        """Return ids and labels, of samples that have a label or of all, of one version or of any."""
        others = self._read("PRAGMA data_version", ())
        state = (others, self._own_writes, labelled, version)
        if self._known is None or self._known[0] != state:
            conditions, values = ["y >= 0" if labelled else "1"], list[object]()
            if version is not None:
                conditions.append("version = ?")
                values.append(version)
            query = f"SELECT id, y FROM samples WHERE {' AND '.join(conditions)} ORDER BY id"
            found = np.array(self._read(query, values), np.int64).reshape(-1, 2)
            self._known = (state, (found[:, 0], found[:, 1]))
        return self._known[1]
