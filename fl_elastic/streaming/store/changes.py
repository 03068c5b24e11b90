"""Changes of a store: offers, labels and withdrawals, each written in a whole transaction."""

from __future__ import annotations

import logging
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
from fl_elastic.streaming.store.bounds import Rows
from fl_elastic.streaming.store.encoding import Encoding
from fl_elastic.streaming.store.policies import Newcomer, lottery, victim
from fl_elastic.streaming.store.sqlite import Database, Facts, note, texts_of

__all__ = ["Change", "Note", "Offer", "Relabelled", "Withdrawn", "Writer"]

_LOG = logging.getLogger("fl_elastic")
# In a place of its own, or in that of a row that leaves for it.
_PLACE = (
    "INSERT INTO samples(slot, id, y, draw, version, x) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT(slot) DO UPDATE SET (id, y, draw, version, x) = "
    "(excluded.id, excluded.y, excluded.draw, excluded.version, excluded.x)"
)
_LEAVE = "DELETE FROM samples WHERE slot = ?"
_IS_HERE = "SELECT 1 FROM samples WHERE id = ?"


@dataclass(frozen=True, eq=False, slots=True)
class Offer:
    """A sample that is offered to a store, as `SampleStore.add` takes it; nothing of it is checked yet.

    Its number is its id, which no other sample has; None for the one after the last.
    """

    x: ArrayLike
    y: Any = None
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


class Writer:
    """Writes changes into a store's file, so many at a time that its log keeps to its bound.

    Its policy says who leaves when the file is full, ``seed`` is that of the lottery for places, and ``encoding``
    that of the first sample.
    """

    def __init__(self, database: Database, policy: str, encoding: str, seed: int) -> None:
        self.database, self.policy, self.encoding, self.seed = database, policy, encoding, seed

    def form(self) -> Encoding | None:
        """Return shape, type and form on disk of samples; None before the first."""
        return self.database.facts().form

    def change(self, changes: Sequence[Change], version: str, note: Note) -> list[int | None]:
        """Make changes in their order; return the id of each whose sample is here, or was until now."""
        made: list[int | None] = []
        while left := changes[len(made) :]:
            rows = self._together(left)
            some, left = left[: rows.many], left[rows.many :]
            made += self._write(some, rows, version, note(left))
        return made

    def delete(self, condition: str, values: Sequence[object]) -> int:
        """Delete the samples for which an SQL condition holds; return how many."""
        gone, some = 0, f"SELECT slot FROM samples WHERE {condition} LIMIT ?"
        query = f"DELETE FROM samples WHERE slot IN ({some})"

        def some_deleted() -> int:
            return self.database.connection.execute(query, (*values, most)).rowcount

        while True:
            form = self.form()
            size = form.row_bytes if form else 0
            most = self.database.bounds.rows_per_transaction(size)
            count = self.database.write(some_deleted, "a deletion", Rows(most, size)) or 0
            gone += count
            # One that is killed may have deleted a part of them.
            if count < most:
                return gone

    def _together(self, changes: Sequence[Change]) -> Rows:
        """Return how many changes go into one transaction."""
        form, size = self.form(), 0
        for many, change in enumerate(changes):
            larger = max(size, self._bytes(change, form))
            # The first sample alone decides what the others look like.
            most = self.database.bounds.rows_per_transaction(larger) if form else 1
            if many >= most:
                return Rows(many, size)
            size = larger
        return Rows(len(changes), size)

    def _bytes(self, change: Change, form: Encoding | None) -> int:
        """Return what a change writes, at most; 0 where it is refused, being more than the log takes."""
        size = form.row_bytes if form else 0
        if isinstance(change, Offer):
            try:
                form = form or Encoding.of(self.encoding, checked_sample(change.x, None))
            except Refused:
                return 0
            size = form.row_bytes
        elif isinstance(change, Relabelled):
            # SQLite writes the whole row anew for another label.
            query = "SELECT LENGTH(x) FROM samples WHERE id = ?"
            size = sum(row[0] for row in self.database.read(query, change.number))
        return size if size <= self.database.bounds.largest_row else 0

    def _write(
        self, changes: Sequence[Change], rows: Rows, version: str, noted: Mapping[str, object]
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
    """Some changes, within `Database.write`."""

    def __init__(self, writer: Writer, version: str) -> None:
        self._writer, self._version = writer, version
        self._connection, self._bounds = writer.database.connection, writer.database.bounds
        # Another process may have written since the last transaction.
        self._texts = texts_of(self._connection)
        self._facts = Facts.of(self._texts)
        self._rooms: int | None = None
        self.refused: Counter[str] = Counter()

    def make(self, change: Change) -> int | None:
        """Make a change, as far as it makes sense; return the id of its sample, None if that is not here."""
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
        """Write down what is new, and further texts."""
        self._facts.rejected += self.refused
        now = {k: str(text) for k, text in {**self._facts.to_texts(), **further}.items()}
        note(self._connection, {k: text for k, text in now.items() if self._texts.get(k) != text})

    def _offered(self, offer: Offer) -> int | None:
        facts, number = self._facts, offer.number
        if number is not None and number <= facts.last:
            if self._connection.execute(_IS_HERE, (number,)).fetchone():
                # To offer it again changes nothing.
                return number
        x, form = checked_sample(offer.x, facts.form), facts.form
        if form is None:
            form = Encoding.of(self._writer.encoding, x)
            x = checked_sample(x, form)
        label = kept_label(checked_label(offer.y))
        size = form.row_bytes
        if size > self._bounds.largest_row:
            raise Refused(f"{size} bytes are too many for a store of this capacity")
        # The first sample that makes sense decides what the others look like.
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
        """Whether somebody has to leave for a newcomer; if not, it is counted."""
        if self._rooms is None:
            self._rooms = self._bounds.rooms(self._writer.database.used_pages(), row_bytes)
        if not self._rooms:
            return True
        # Asked again once they are taken, or a row has left without another one in its place.
        self._rooms = self._rooms - 1 or None
        return False

    def _place_for(self, newcomer: Newcomer, row_bytes: int) -> int | None:
        """Return the place that a newcomer takes, in which another one still may be; None if it is turned away."""
        connection, policy = self._connection, self._writer.policy
        slot = victim(connection, policy, newcomer)
        if slot is not None and self._bounds.is_tight(
            self._writer.database.used_pages(), row_bytes
        ):
            # A further row leaves: rows come and go at random, and leave gaps in the indices.
            connection.execute(_LEAVE, (slot,))
            connection.execute(_LEAVE, (victim(connection, policy, newcomer),))
            self._rooms = None
        return slot
