"""Changes of a store (samples, labels, withdrawals) in transactions, and the policies for a full store."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import ArrayLike

from fl_elastic.streaming.intake import (
    Refused,
    checked_label,
    checked_sample,
    kept_label,
)
from fl_elastic.streaming.store.bounds import RowsToWrite
from fl_elastic.streaming.store.encoding import Encoding
from fl_elastic.streaming.store.sqlite import Database, Facts, note, texts_of

_LOG = logging.getLogger("fl_elastic")
# Inserts into a free slot, or replaces the row in a used one.
_PLACE = (
    "INSERT INTO samples(slot, id, y, draw, version, x) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT(slot) DO UPDATE SET (id, y, draw, version, x) = "
    "(excluded.id, excluded.y, excluded.draw, excluded.version, excluded.x)"
)
_LEAVE = "DELETE FROM samples WHERE slot = ?"
_IS_HERE = "SELECT 1 FROM samples WHERE id = ?"

# The class with the most samples; of equally large ones, that of the new sample.
_LARGEST = "SELECT y FROM classes ORDER BY n DESC, y = :label DESC, y LIMIT 1"

STORAGE_POLICIES = {
    "reservoir": "SELECT CASE WHEN draw > :draw THEN slot END FROM samples ORDER BY draw DESC LIMIT 1",
    "class_balanced": (
        "SELECT CASE WHEN y <> :label OR draw > :draw THEN slot END FROM samples "
        f"WHERE y = ({_LARGEST}) ORDER BY draw DESC LIMIT 1"
    ),
}
"""Storage policies by name: an SQL query for the slot that a new sample takes; NULL rejects the sample.

``reservoir`` keeps the samples with the smallest random numbers, and so each sample of the stream with equal
probability (Vitter 1985). ``class_balanced`` keeps equally many samples of each class as far as possible, with a
reservoir within each class (Chrysakis and Moens 2020); samples without a label form a class of their own.
"""


@dataclass(frozen=True)
class Newcomer:
    """A sample that is to be stored: its class as in column ``y``, and its random number from `lottery`."""

    label: int
    draw: float


def lottery(seed: int, number: int) -> float:
    """Return a random number in [0, 1) for the n-th sample of a stream; it is the same after every restart.

    Storage policies keep the samples with the smallest numbers.

    >>> lottery(0, 1) == lottery(0, 1) != lottery(0, 2)
    True
    """
    digest = hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=8).digest()
    return int(struct.unpack("<Q", digest)[0] >> 11) / 2.0**53


def victim(connection: sqlite3.Connection, policy: str, newcomer: Newcomer) -> int | None:
    """Return the slot that the new sample takes under a storage policy; None to reject it."""
    given = {"label": newcomer.label, "draw": newcomer.draw}
    row = connection.execute(STORAGE_POLICIES[policy], given).fetchone()
    return None if row is None or row[0] is None else int(row[0])


@dataclass(frozen=True, eq=False, slots=True)
class Offer:
    """A sample that is offered to a store, as for `SampleStore.add`; it is not checked yet.

    Its number becomes its id, which must be unique; None stands for the next free number.
    """

    x: ArrayLike
    y: Any = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Relabelled:
    """A label that came later than its sample; ignored if the sample is not in the store."""

    number: int
    y: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A sample that is deleted from the store because the caller keeps it itself."""

    number: int


Change: TypeAlias = Offer | Relabelled | Withdrawn
"""A change of a store; changes are made in the order of the stream."""
Note: TypeAlias = Callable[[Sequence[Change]], Mapping[str, object]]
"""Called with the changes that remain after a transaction; returns facts to write in the transaction."""


class Writer:
    """Writes changes into a store's file, in transactions small enough for the bound of its log.

    ``policy`` decides which sample is deleted when the file is full, ``seed`` determines the random numbers of
    `lottery`, and ``encoding`` is used if there is no sample yet.
    """

    def __init__(self, database: Database, policy: str, encoding: str, seed: int) -> None:
        self.database, self.policy, self.encoding, self.seed = database, policy, encoding, seed

    def form(self) -> Encoding | None:
        """Return shape, type and encoding of the samples; None before the first one."""
        return self.database.facts().form

    def change(self, changes: Sequence[Change], version: str, note: Note) -> list[int | None]:
        """Make changes in order; return for each the id of its sample, None if that is not in the store.

        A sample that a change has just deleted is returned with its id, too.
        """
        made: list[int | None] = []
        while left := changes[len(made) :]:
            rows = self._together(left)
            some, left = left[: rows.many], left[rows.many :]
            made += self._write(some, rows, version, note(left))
        return made

    def delete(self, condition: str, values: Sequence[object]) -> int:
        """Delete the samples for which an SQL condition holds; return their number."""
        gone, some = 0, f"SELECT slot FROM samples WHERE {condition} LIMIT ?"
        query = f"DELETE FROM samples WHERE slot IN ({some})"

        def some_deleted() -> int:
            return self.database.connection.execute(query, (*values, most)).rowcount

        while True:
            form = self.form()
            size = form.row_bytes if form else 0
            most = self.database.bounds.rows_per_transaction(size)
            count = self.database.write(some_deleted, "a deletion", RowsToWrite(most, size)) or 0
            gone += count
            # A process that is killed here may have deleted only a part of them.
            if count < most:
                return gone

    def _together(self, changes: Sequence[Change]) -> RowsToWrite:
        """Return how many of the changes go into one transaction."""
        form, size = self.form(), 0
        for many, change in enumerate(changes):
            larger = max(size, self._bytes(change, form))
            # The first sample is written alone, because it determines the form of all others.
            most = self.database.bounds.rows_per_transaction(larger) if form else 1
            if many >= most:
                return RowsToWrite(many, size)
            size = larger
        return RowsToWrite(len(changes), size)

    def _bytes(self, change: Change, form: Encoding | None) -> int:
        """Return the most bytes that a change writes; 0 if it will be refused, or is larger than the log allows."""
        size = form.row_bytes if form else 0
        if isinstance(change, Offer):
            try:
                form = form or Encoding.of(self.encoding, checked_sample(change.x, None))
            except Refused:
                return 0
            size = form.row_bytes
        elif isinstance(change, Relabelled):
            # SQLite rewrites the whole row to change a label.
            query = "SELECT LENGTH(x) FROM samples WHERE id = ?"
            size = sum(row[0] for row in self.database.read(query, change.number))
        return size if size <= self.database.bounds.largest_row else 0

    def _write(
        self,
        changes: Sequence[Change],
        rows: RowsToWrite,
        version: str,
        noted: Mapping[str, object],
    ) -> list[int | None]:
        def written() -> tuple[list[int | None], Counter[str]]:
            transaction = _Transaction(self, version)
            made = [transaction.make(change) for change in changes]
            transaction.note(noted)
            return made, transaction.refused

        done = self.database.write(written, f"{len(changes)} samples", rows)
        if done is None:
            self.database.lost["disk"] += len(changes)
            return [None] * len(changes)
        for reason, count in done[1].items():
            _LOG.warning("%s samples rejected: %s", count, reason)
        return done[0]


class _Transaction:
    """Several changes, made within one `Database.write`."""

    def __init__(self, writer: Writer, version: str) -> None:
        self._writer, self._version = writer, version
        self._connection, self._bounds = writer.database.connection, writer.database.bounds
        # Read again: another process may have written since the last transaction.
        self._texts = texts_of(self._connection)
        self._facts = Facts.of(self._texts)
        self._rooms: int | None = None
        self.refused: Counter[str] = Counter()

    def make(self, change: Change) -> int | None:
        """Make a change if it is valid; return the id of its sample, None if that is not in the store."""
        number, execute = change.number, self._connection.execute
        if isinstance(change, Offer):
            try:
                return self._offered(change)
            except Refused as why:
                self.refused[str(why)] += 1
                return None
        if isinstance(change, Relabelled):
            found = execute("UPDATE samples SET y = ? WHERE id = ?", (kept_label(change.y), number))
        else:
            found = execute("DELETE FROM samples WHERE id = ?", (number,))
            self._rooms = None
        return number if found.rowcount else None

    def note(self, further: Mapping[str, object]) -> None:
        """Write the facts that have changed, and further texts."""
        self._facts.rejected += self.refused
        now = {k: str(text) for k, text in {**self._facts.to_texts(), **further}.items()}
        note(self._connection, {k: text for k, text in now.items() if self._texts.get(k) != text})

    def _offered(self, offer: Offer) -> int | None:
        facts, number = self._facts, offer.number
        if number is not None and number <= facts.last:
            if self._connection.execute(_IS_HERE, (number,)).fetchone():
                # Offering a stored sample again changes nothing.
                return number
        x, form = checked_sample(offer.x, facts.form), facts.form
        if form is None:
            form = Encoding.of(self._writer.encoding, x)
            x = checked_sample(x, form)
        form.refuse_beyond(x)
        label = kept_label(checked_label(offer.y))
        size = form.row_bytes
        if size > self._bounds.largest_row:
            raise Refused(f"{size} bytes are too many for a store of this capacity")
        # The first valid sample determines the form of all others.
        facts.form, facts.seen = form, facts.seen + 1
        number = facts.last + 1 if number is None else number
        facts.last = max(facts.last, number)
        newcomer = Newcomer(label, lottery(self._writer.seed, facts.seen))
        slot = None
        if self._is_full(size):
            slot = self._place_for(newcomer, size)
            if slot is None:
                return None
        row = (slot, number, label, newcomer.draw, self._version, form.encode(x))
        self._connection.execute(_PLACE, row)
        return number

    def _is_full(self, row_bytes: int) -> bool:
        """Return whether a sample must be deleted for a new one; if not, count one free place less."""
        if self._rooms is None:
            self._rooms = self._bounds.rooms(self._writer.database.used_pages(), row_bytes)
        if not self._rooms:
            return True
        # None, when the counted places are used up, makes the next call count free places again.
        self._rooms = self._rooms - 1 or None
        return False

    def _place_for(self, newcomer: Newcomer, row_bytes: int) -> int | None:
        """Return the slot for a new sample, which another one may still occupy; None if the new one is rejected."""
        connection, policy = self._connection, self._writer.policy
        slot = victim(connection, policy, newcomer)
        if slot is not None and self._bounds.is_tight(
            self._writer.database.used_pages(), row_bytes
        ):
            # Delete another row as well, because random insertions and deletions leave gaps in the indices.
            connection.execute(_LEAVE, (slot,))
            connection.execute(_LEAVE, (victim(connection, policy, newcomer),))
            self._rooms = None
        return slot
