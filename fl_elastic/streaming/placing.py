"""Placing offered samples in a store's file, in one transaction."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.streaming.class_counts import ClassCounts
from fl_elastic.streaming.database import Database
from fl_elastic.streaming.encoding import Encoding
from fl_elastic.streaming.storage_policies import Newcomer, StoragePolicy, lottery
from fl_elastic.streaming.stored import UNLABELLED, Change, Offer, Placed, Relabelled, Withdrawn

__all__ = ["Placing", "Written", "as_array", "extra_bytes", "label_of"]

_PLACE = (
    "INSERT OR REPLACE INTO samples(slot, id, y, draw, t, version, outputs, x) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_UNKNOWN: NDArray[Any] = np.array(None, object)


@dataclass(frozen=True)
class Written:
    """What became of some offers.

    Parameters
    ----------
    placed : tuple of Placed
        Of each.
    refused : Counter
        How many made no sense, by reason.
    encoding : Encoding or None
        Of the store; None before the first sample that makes sense.
    """

    placed: tuple[Placed, ...]
    refused: Counter[str]
    encoding: Encoding | None


class Placing:
    """One transaction in which samples are placed; use it once, within `Database.writing`.

    Parameters
    ----------
    database : Database
        The file.
    policy : StoragePolicy
        Who leaves when it is full.
    form : Encoding or str
        Of the store, or the name of that which its first sample gets.
    seed : int
        Of the lottery.
    version : str
        What the samples belong to.
    """

    def __init__(
        self,
        database: Database,
        policy: StoragePolicy,
        form: Encoding | str,
        seed: int,
        version: str,
    ) -> None:
        self._database, self._policy, self._seed, self._version = database, policy, seed, version
        self._connection = database.connection
        self._settings = database.settings()
        self._counts = ClassCounts(self._connection)
        if isinstance(form, str) and "encoding" in self._settings:
            # Another process has added the first sample.
            form = Encoding.from_json(self._settings["encoding"])
        self._form = form
        self._row_bytes = 0 if isinstance(form, str) else form.row_bytes
        self._seen = int(self._settings.get("seen", "0"))
        self._last = int(self._settings.get("last_id", "0"))
        self._rooms: int | None = None

    def place(self, changes: Sequence[Change]) -> Written:
        """Place what makes sense, each in a free place or in that of one who leaves for it; change what is here."""
        now, refused, placed = time.time(), Counter[str](), []
        for offer in changes:
            if not isinstance(offer, Offer):
                placed.append(Placed(offer.number, self._changed(offer)))
                continue
            if (
                offer.number is not None
                and offer.number <= self._last
                and self._label(offer.number) is not None
            ):
                # It is here: to offer it again changes nothing.
                placed.append(Placed(offer.number, True))
                continue
            array, label = as_array(offer.x), label_of(offer.y)
            when = now if offer.t is None else _number(offer.t)
            told = None if offer.outputs is None else np.asarray(offer.outputs, np.float32)
            encoding, problem = self._checked(array, label, when, extra_bytes(told))
            if problem:
                refused[problem] += 1
                placed.append(Placed(None, False))
                continue
            number = self._last + 1 if offer.number is None else offer.number
            kept = self._placed(number, encoding, array, label, when, told)
            placed.append(Placed(number, kept))
        self._settle(refused)
        form = None if isinstance(self._form, str) else self._form
        return Written(tuple(placed), refused, form)

    def _checked(
        self, array: NDArray[Any], label: int, when: float, extra: int
    ) -> tuple[Encoding, str]:
        """Return the form of a sample and what is wrong with it; the first good one decides the store's."""
        form = self._form
        encoding = Encoding.of(form, array) if isinstance(form, str) else form
        problem = encoding.problem(array) or _odd(label, when)
        if problem:
            return encoding, problem
        if isinstance(form, str):
            self._row_bytes = encoding.row_bytes
        size = self._row_bytes + extra
        if not self._database.bounds.rows_per_transaction(size):
            return encoding, f"{size} bytes are too many for a store of this capacity"
        self._form = encoding
        return encoding, ""

    def _changed(self, change: Relabelled | Withdrawn) -> bool:
        """Give a sample another label, or let it leave; return whether it was here."""
        before = self._label(change.number)
        if before is None:
            return False
        self._counts.add(before, -1)
        if isinstance(change, Relabelled):
            self._connection.execute(
                "UPDATE samples SET y = ? WHERE id = ?", (change.y, change.number)
            )
            self._counts.add(change.y, 1)
        else:
            self._connection.execute("DELETE FROM samples WHERE id = ?", (change.number,))
            self._rooms = None
        return True

    def _label(self, number: int) -> int | None:
        row = self._connection.execute("SELECT y FROM samples WHERE id = ?", (number,)).fetchone()
        return None if row is None else int(row[0])

    def _placed(
        self,
        number: int,
        encoding: Encoding,
        array: NDArray[Any],
        label: int,
        when: float,
        told: NDArray[np.float32] | None,
    ) -> bool:
        self._seen, self._last = self._seen + 1, max(self._last, number)
        newcomer = Newcomer(label, lottery(self._seed, self._seen))
        slot = self._place(newcomer, self._row_bytes + extra_bytes(told))
        if slot is None:
            return False
        outputs = None if told is None else told.tobytes()
        row = (
            slot or None, number, label, newcomer.draw, when, self._version, outputs,
            encoding.encode(array),
        )  # fmt: skip
        self._connection.execute(_PLACE, row)
        self._counts.add(label, 1)
        return True

    def _place(self, newcomer: Newcomer, row_bytes: int) -> int | None:
        """Return the slot for a newcomer, made free for it; 0 for a new one, None if it is turned away."""
        if self._rooms is None:
            self._rooms = self._database.bounds.rooms(self._database.used_pages(), row_bytes)
        if self._rooms:
            # Asked again once they are taken, or a row has left without another one in its place.
            self._rooms = self._rooms - 1 or None
            return 0
        slot = self._leaving(newcomer)
        if slot is None:
            return None
        if self._database.bounds.is_tight(self._database.used_pages(), row_bytes):
            self._make_place(newcomer, slot)
        return slot

    def _leaving(self, newcomer: Newcomer) -> int | None:
        """Return the slot of the row that leaves for a newcomer, no longer counted."""
        self._counts.settle()
        slot = self._policy.victim(self._connection, newcomer)
        if slot is not None:
            row = self._connection.execute(
                "SELECT y FROM samples WHERE slot = ?", (slot,)
            ).fetchone()
            self._counts.add(int(row[0]), -1)
        return slot

    def _make_place(self, newcomer: Newcomer, taken: int) -> None:
        """Let a further row leave: rows come and go at random, and leave gaps in the indices."""
        self._connection.execute("DELETE FROM samples WHERE slot = ?", (taken,))
        slot = self._leaving(newcomer)
        if slot is not None:
            self._connection.execute("DELETE FROM samples WHERE slot = ?", (slot,))
        self._rooms = None

    def _settle(self, refused: Counter[str]) -> None:
        self._counts.settle()
        now: dict[str, object] = {"seen": self._seen, "last_id": self._last}
        if not isinstance(self._form, str):
            now["encoding"] = self._form.to_json()
        if refused:
            before = Counter[str](json.loads(self._settings.get("rejected", "{}")))
            now["rejected"] = json.dumps(before + refused)
        self._database.put(
            {key: value for key, value in now.items() if self._settings.get(key) != str(value)}
        )


def as_array(x: ArrayLike) -> NDArray[Any]:
    """Return a sample as an array; one of objects, which no store takes, if it is none."""
    try:
        return np.asarray(x)
    except (ValueError, TypeError):
        return _UNKNOWN


def label_of(y: Any) -> int:
    """Return a label as a whole number; less than -1 if it is none.

    >>> label_of(3), label_of(None), label_of(2.5), label_of("cat")
    (3, -1, -2, -2)
    """
    if y is None:
        return UNLABELLED
    if type(y) is int:
        return y
    value = np.asarray(y)
    whole = value.dtype.kind in "biu" or (value.dtype.kind == "f" and float(value).is_integer())
    return int(value) if whole else UNLABELLED - 1


def extra_bytes(outputs: ArrayLike | None) -> int:
    """Return what the outputs of a sample take beside it."""
    return 0 if outputs is None else 4 * np.size(outputs)


def _number(t: Any) -> float:
    try:
        return float(t)
    except (ValueError, TypeError, OverflowError):
        return float("nan")


def _odd(label: int, when: float) -> str:
    if label < UNLABELLED or label >= 2**31:
        return "the label is no class number"
    return "" if np.isfinite(when) else "the time is not finite"
