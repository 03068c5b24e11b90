"""What is done to a store's file, in whole transactions: on a fresh file where this one is damaged."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from fl_elastic.errors import StoreError
from fl_elastic.streaming.intake import (
    UNLABELLED,
    Refused,
    checked_label,
    checked_sample,
    checked_time,
)
from fl_elastic.streaming.store.encoding import ENCODINGS, Encoding
from fl_elastic.streaming.store.policies import STORAGE_POLICIES, Newcomer, lottery
from fl_elastic.streaming.store.sqlite import Database, is_damage

__all__ = ["Change", "Note", "Offer", "Placed", "Relabelled", "StoreFile", "Withdrawn"]

_LOG = logging.getLogger("fl_elastic")
_Found = TypeVar("_Found")
# In a place of its own, or in that of a row that leaves for it.
_PLACE = (
    "INSERT INTO samples(slot, id, y, draw, t, version, outputs, x) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT(slot) DO UPDATE SET (id, y, draw, t, version, outputs, x) = "
    "(excluded.id, excluded.y, excluded.draw, excluded.t, excluded.version, excluded.outputs, excluded.x)"
)
_LEAVE = "DELETE FROM samples WHERE slot = ?"


@dataclass(frozen=True, eq=False, slots=True)
class Offer:
    """A sample that is offered to a store, as `SampleStore.add` takes it; nothing of it is checked yet.

    Its number is its id, which no other sample has; None for the one after the last.
    """

    x: ArrayLike
    y: Any = None
    t: Any = None
    outputs: ArrayLike | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Relabelled:
    """A label that came late; it costs nothing if the sample is not here."""

    number: int
    y: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A sample that leaves, because somebody else keeps it from now on."""

    number: int


Change: TypeAlias = Offer | Relabelled | Withdrawn
"""What is done to a store, in the order of the stream."""
Note: TypeAlias = Callable[[Sequence[Change]], Mapping[str, object]]
"""Told which changes are left after those of a transaction, says what is written with these."""


class Placed(NamedTuple):
    """What became of a change: the id, None if an offer makes no sense or is lost; whether it is, or was, here."""

    number: int | None
    kept: bool


class StoreFile:
    """The file of a `SampleStore`, whose parameters it has; `lost` counts what could not be written, by reason."""

    def __init__(
        self, path: Path, capacity_bytes: int, policy: str, encoding: str, seed: int
    ) -> None:
        _check_known(encoding)
        self._settings = {"policy": policy, "encoding_name": encoding, "seed": str(seed)}
        self.policy, self.encoding, self.seed = STORAGE_POLICIES.make(policy), encoding, seed
        self._form: Encoding | None = None
        self._form_text = self._wanted = ""
        self._failures = 0
        self.lost: Counter[str] = Counter()
        self.database = Database(path, capacity_bytes)
        self._settle()

    @property
    def form(self) -> Encoding | None:
        """Shape, type and form on disk of every sample; None before the first."""
        # Another process may have added it.
        return self.form_in(self.noted("encoding")) if self._form is None else self._form

    def form_of(self, rows: Sequence[bytes]) -> Encoding | None:
        """Return the form that these rows can be read with, as another process may write others by now."""
        if self.form is None or not self.form.reads(rows):
            self.form_in(self.noted("encoding"))
        return self._form

    def form_in(self, noted: str) -> Encoding | None:
        """Return the form that is noted, as this process wants it written from now on."""
        if noted != self._form_text:
            self._form, self._form_text = _form(noted), noted
        if self._form and self._wanted:
            self._form = self._form.written_as(self._wanted)
        return self._form

    def write_as(self, encoding: str) -> None:
        """Write the samples to come in this encoding; see `SampleStore.write_as`."""
        _check_known(encoding)
        if self.form is not None:
            self._form = self.form.written_as(encoding)
        self._wanted = self.encoding = encoding
        # Noted now, for a later life to go on with it; where the disk is full, with the next sample.
        self._written(lambda: self._change((), 0, "", {}), "the form of samples")

    def noted(self, key: str) -> str:
        """Return what was last written under a key; empty for nothing."""
        rows = self.read("SELECT value FROM meta WHERE key = ?", key)
        return str(rows[0][0]) if rows else ""

    def state(self) -> tuple[object, ...]:
        """Return something that is another one whenever the samples may be others."""
        writes_of_others = self.read("PRAGMA data_version")[0][0]
        connection = self.database.connection
        return connection, connection.total_changes, writes_of_others

    def read(self, query: str, *values: object) -> list[Any]:
        """Return rows, of a fresh file where this one turns out to be damaged; StoreError if it cannot be read."""
        try:
            return self._tried(lambda: self.database.connection.execute(query, values).fetchall())
        except sqlite3.Error as error:
            raise StoreError(f"cannot read {self.database.path}: {error}") from None

    def change(
        self, changes: Sequence[Change], version: str, note: Note = lambda _: {}
    ) -> list[Placed]:
        """Make changes, so many at a time that the log keeps to its bound; say what became of each."""
        placed: list[Placed] = []
        while left := changes[len(placed) :]:
            many, size = self._together(left)
            some = left[:many]
            written = self._written(
                partial(self._change, some, size, version, note(left[many:])), f"{many} samples"
            )
            if written is None:
                self.lost["disk"] += many
            placed += written or [Placed(None, False)] * many
        return placed

    def delete(self, condition: str, values: Sequence[object]) -> int:
        """Delete the samples for which an SQL condition holds; return how many."""

        def some_deleted() -> int:
            with self.database.writing(many, size) as connection:
                return connection.execute(query, values).rowcount

        gone = count = many = 0
        # One that is killed may have deleted a part of them.
        while count == many:
            size = self.form.most_row_bytes if self.form else 0
            many = self.database.bounds.rows_per_transaction(size)
            some = f"SELECT slot FROM samples WHERE {condition} LIMIT {many}"
            query = f"DELETE FROM samples WHERE slot IN ({some})"
            count = self._written(some_deleted, "a deletion") or 0
            gone += count
        return gone

    def _together(self, changes: Sequence[Change]) -> tuple[int, int]:
        """Return how many changes go into one transaction, and the bytes of the largest of their rows."""
        # The first sample alone decides what the others look like.
        bounds, leaving = self.database.bounds, self._leave_for_one
        largest, most = 0, bounds.rows_per_transaction(0, leaving) if self.form else 1
        for place, change in enumerate(changes):
            size = max(largest, self._bytes(change))
            if size > largest and most > 1:
                most = bounds.rows_per_transaction(size, leaving)
            if place >= most:
                return place, largest
            largest = size
        return len(changes), largest

    @property
    def _leave_for_one(self) -> int:
        return self._form.leave_for_one if self._form else 1

    def _bytes(self, change: Change) -> int:
        """Return what a change writes, at most; 0 where it is refused, being more than the log takes."""
        form, size = self._form, 0
        if isinstance(change, Offer):
            beside = 0 if change.outputs is None else 4 * np.size(change.outputs)
            try:
                form = form or Encoding.of(self.encoding, checked_sample(change.x, None))
            except Refused:
                return 0
            size = beside + form.row_bytes
        elif isinstance(change, Relabelled):
            # SQLite writes the whole row anew for another label.
            query = "SELECT COALESCE(LENGTH(outputs), 0) + LENGTH(x) FROM samples WHERE id = ?"
            size = sum(row[0] for row in self.read(query, change.number))
        elif form:
            size = form.most_row_bytes
        largest = self.database.bounds.largest_row_for(self._leave_for_one)
        return size if size <= largest else 0

    def _change(
        self, changes: Sequence[Change], size: int, version: str, noted: Mapping[str, object]
    ) -> list[Placed]:
        with self.database.writing(len(changes), size, self._leave_for_one):
            placing = _Placing(self, version)
            placed = [placing.place(change) for change in changes]
            placing.note(noted)
        for reason, count in placing.refused.items():
            _LOG.warning("%s samples rejected: %s", count, reason)
        if placing.form:
            self._form, self._form_text = placing.form, placing.form.to_json()
        return placed

    def _written(self, action: Callable[[], _Found], what: str) -> _Found | None:
        """Do it; None where the disk does not take it."""
        try:
            return self._tried(action)
        except sqlite3.DatabaseError as error:
            self._failures += 1
            # A disk may stay full for long: said the first time, the second, the fourth, ...
            if self._failures & (self._failures - 1) == 0:
                _LOG.warning(
                    "%s could not be written to %s: %s (failure %s)",
                    what, self.database.path, error, self._failures,
                )  # fmt: skip
            return None

    def _tried(self, action: Callable[[], _Found]) -> _Found:
        """Do it, on a fresh file where this one is damaged."""
        try:
            if self.database.is_elsewhere():
                # Another process has put the file aside, or somebody has deleted it.
                _LOG.warning("the sample store %s was replaced: opened anew", self.database.path)
                self.database.reopen()
                self._settle()
            return action()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._start_afresh(str(error))
        return action()

    def _start_afresh(self, why: str) -> None:
        self.database.reopen(why)
        self.lost["file was damaged"] += 1
        self._settle()

    def _settle(self) -> None:
        """Take over what the file was made with; write it into a fresh one."""
        database, made = self.database, self.database.notes()
        kept = {key: made.get(key, "") for key in self._settings}
        if not any(kept.values()):
            with database.writing():
                database.note(self._settings)
        elif different := [key for key in kept if kept[key] != self._settings[key]]:
            database.connection.close()
            raise StoreError(
                f"the store {database.path} was made with "
                + ", ".join(f"{key} {kept[key]}" for key in different)
                + "; open it with that, or use another file"
            )
        try:
            self._form, self._form_text = None, ""
            self.form_in(made.get("encoding", ""))
        except StoreError as error:
            self._start_afresh(str(error))


class _Placing:
    """One transaction of changes; within `Database.writing`."""

    def __init__(self, file: StoreFile, version: str) -> None:
        self._file, self._database, self._version = file, file.database, version
        self._execute = self._database.connection.execute
        # Another process may have written since the last transaction.
        self._noted = self._database.notes()
        self.form = file.form_in(self._noted.get("encoding", ""))
        self._seen, self._last = (int(self._noted.get(key, "0")) for key in ("seen", "last_id"))
        self._rooms: int | None = None
        self.refused: Counter[str] = Counter()

    def place(self, change: Change) -> Placed:
        """Do what a change says, as far as it makes sense."""
        number = change.number
        if isinstance(change, Relabelled):
            query = "UPDATE samples SET y = ? WHERE id = ?"
            return Placed(number, self._execute(query, (change.y, number)).rowcount > 0)
        if isinstance(change, Withdrawn):
            self._rooms = None
            gone = self._execute("DELETE FROM samples WHERE id = ?", (number,)).rowcount
            return Placed(number, gone > 0)
        if number is not None and number <= self._last:
            if self._execute("SELECT 1 FROM samples WHERE id = ?", (number,)).fetchone():
                # It is here: to offer it again changes nothing.
                return Placed(number, True)
        try:
            return self._offered(change)
        except Refused as why:
            self.refused[str(why)] += 1
            return Placed(None, False)

    def note(self, facts: Mapping[str, object]) -> None:
        """Write down what is new, and further facts."""
        now: dict[str, object] = {"seen": self._seen, "last_id": self._last, **facts}
        if self.form:
            now["encoding"] = self.form.to_json()
        if self.refused:
            before = Counter[str](json.loads(self._noted.get("rejected", "{}")))
            now["rejected"] = json.dumps(before + self.refused)
        self._database.note({k: v for k, v in now.items() if self._noted.get(k) != str(v)})

    def _offered(self, offer: Offer) -> Placed:
        form, x = self.form, checked_sample(offer.x, self.form)
        if form is None:
            form = Encoding.of(self._file.encoding, x)
            x = checked_sample(x, form)
        given = checked_label(offer.y)
        label = UNLABELLED if given is None else given
        when = time.time() if offer.t is None else checked_time(offer.t)
        told = None if offer.outputs is None else np.asarray(offer.outputs, np.float32).tobytes()
        size = form.row_bytes + len(told or b"")
        if size > self._database.bounds.largest_row_for(form.leave_for_one):
            raise Refused(f"{size} bytes are too many for a store of this capacity")
        # The first sample that makes sense decides what the others look like.
        self.form = form
        number = self._last + 1 if offer.number is None else offer.number
        self._seen, self._last = self._seen + 1, max(self._last, number)
        newcomer = Newcomer(label, lottery(self._file.seed, self._seen))
        if self._is_full(size):
            slot = self._place_for(newcomer, size)
            if slot is None:
                return Placed(number, False)
        else:
            slot = None
        row = (slot, number, label, newcomer.draw, when, self._version, told, form.encode(x))
        self._execute(_PLACE, row)
        return Placed(number, True)

    def _is_full(self, row_bytes: int) -> bool:
        """Whether somebody has to leave for a newcomer; if not, it is counted."""
        if self._rooms is None:
            self._rooms = self._database.bounds.rooms(self._database.used_pages(), row_bytes)
        if not self._rooms:
            return True
        # Asked again once they are taken, or a row has left without another one in its place.
        self._rooms = self._rooms - 1 or None
        return False

    def _place_for(self, newcomer: Newcomer, row_bytes: int) -> int | None:
        """Return the place that a newcomer takes, in which another one still may be; None if it is turned away."""
        database, policy = self._database, self._file.policy
        slot = policy.victim(database.connection, newcomer)
        if slot is not None and database.bounds.is_tight(database.used_pages(), row_bytes):
            # A further row leaves: rows come and go at random, and leave gaps in the indices.
            self._execute(_LEAVE, (slot,))
            for _ in range(self.form.leave_for_one if self.form else 1):
                self._execute(_LEAVE, (policy.victim(database.connection, newcomer),))
            self._rooms = None
        return slot


def _check_known(encoding: str) -> None:
    if encoding not in ENCODINGS:
        raise StoreError(f"encoding {encoding!r} is unknown: known are {', '.join(ENCODINGS)}")


def _form(text: str) -> Encoding | None:
    return Encoding.from_json(text) if text else None
