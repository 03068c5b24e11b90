"""A bounded, crash-safe memory of a stream on disk."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import StoreError
from fl_elastic.streaming.database import Database, is_damage
from fl_elastic.streaming.encoding import ENCODINGS, Encoding
from fl_elastic.streaming.retrieval import make_retrieval
from fl_elastic.streaming.storage_policies import Newcomer, lottery, make_storage_policy
from fl_elastic.streaming.stored import UNLABELLED, Samples

__all__ = ["SampleStore"]

_LOG = logging.getLogger("fl_elastic")
_Row: TypeAlias = tuple[Any, Any, Any, Any]
_PLACE = (
    "INSERT OR REPLACE INTO samples(slot, id, y, draw, t, version, outputs, x) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)


class SampleStore:
    """Keeps samples of a stream in a SQLite file that never grows beyond its bound.

    One process may add while another one draws, labels and deletes. A process that is killed loses at most the
    samples of the call it was in. A damaged file is put aside and a fresh one started; a full disk and samples
    that do not fit cost themselves alone, and are counted in `rejected`.

    Parameters
    ----------
    path : path-like
        The file. What it was made with (encoding, policy, seed) holds again when it is opened again.
    capacity_bytes : int
        Bound of the file and its write-ahead log together.
    policy : str
        Registered storage policy: ``reservoir``, ``class_balanced``, ``ring``.
    encoding : {"raw", "fp16", "int8"}
        ``raw`` keeps inputs as they are; the others are for features.
    seed : int
        Of the lottery for places.

    Raises
    ------
    StoreError
        If the capacity is too small, the file cannot be opened, or was made with other settings.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = SampleStore(folder.name + "/samples.db", capacity_bytes=2**20)
    >>> [store.add(np.full(4, i, np.float32), i % 2) for i in range(4)]
    [1, 2, 3, 4]
    >>> x, y = store.sample(3)
    >>> x.shape, len(y), len(store)
    ((3, 4), 3, 4)
    >>> store.delete([1, 2]), len(store)
    (2, 2)
    >>> store.close(); folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        policy: str = "reservoir",
        encoding: str = "raw",
        seed: int = 0,
    ) -> None:
        if encoding not in ENCODINGS:
            raise StoreError(f"encoding {encoding!r} is unknown: known are {', '.join(ENCODINGS)}")
        self._policy = make_storage_policy(policy)
        self._settings = {"policy": policy, "encoding_name": encoding, "seed": str(seed)}
        self._seed, self._encoding_name = seed, encoding
        self._lost: Counter[str] = Counter()
        self._index: tuple[object, NDArray[np.int64], NDArray[np.int64]] | None = None
        self._own_writes = 0
        self._database = Database(Path(path), int(capacity_bytes))
        self._encoding: Encoding | None = None
        self._settle()

    def __len__(self) -> int:
        row = self._read("SELECT COALESCE(SUM(n), 0) FROM classes")
        return int(row[0][0]) if row else 0

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity_bytes(self) -> int:
        """Bound of the file and its log."""
        return self._database.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What the file and its log take on the disk now."""
        return self._database.used_bytes()

    @property
    def seen(self) -> int:
        """Samples that were offered and made sense, kept or not."""
        return int(self._database.get("seen", "0"))

    @property
    def rejected(self) -> dict[str, int]:
        """How many samples made no sense or could not be written, by reason."""
        kept: Counter[str] = Counter(json.loads(self._database.get("rejected", "{}")))
        return dict(kept + self._lost)

    @property
    def classes(self) -> dict[int, int]:
        """How many samples of each label there are; `UNLABELLED` for those without."""
        rows = self._read("SELECT y, n FROM classes WHERE n > 0 ORDER BY y")
        return {int(label): int(count) for label, count in rows}

    @overload
    def add(
        self,
        x: ArrayLike,
        y: int | None = None,
        t: float | None = None,
        *,
        outputs: ArrayLike | None = None,
        version: str = "",
    ) -> int | None: ...
    @overload
    def add(
        self,
        x: ArrayLike,
        y: Sequence[int] | NDArray[Any],
        t: ArrayLike | None = None,
        *,
        outputs: ArrayLike | None = None,
        version: str = "",
    ) -> list[int | None]: ...
    def add(
        self,
        x: ArrayLike,
        y: Any = None,
        t: Any = None,
        *,
        outputs: ArrayLike | None = None,
        version: str = "",
    ) -> int | list[int | None] | None:
        """Offer a sample, or a batch where ``y`` is a sequence; return the id of each that was kept.

        Parameters
        ----------
        x : array
            One sample, or a batch of them.
        y : int or sequence of int, optional
            Labels; None, or -1 in a sequence, if it is not known yet.
        t : float or sequence of float, optional
            When it was observed; now, if left out.
        outputs : array, optional
            What the model says of it now, for replay that keeps to it.
        version : str
            What the sample belongs to, such as the frozen prefix that made features; see `sample`.
        """
        if np.ndim(y) == 0:
            rows = [(x, y, t, outputs)]
            return self._add(rows, version)[0]
        inputs, labels = np.asarray(x), np.asarray(y)
        times = [t] * len(labels) if t is None or np.ndim(t) == 0 else list(np.asarray(t))
        given = [None] * len(labels) if outputs is None else list(np.asarray(outputs))
        if not len(inputs) == len(labels) == len(times) == len(given):
            raise StoreError(f"{len(inputs)} samples do not fit {len(labels)} labels: give as many")
        batch: list[_Row] = list(zip(inputs, labels, times, given, strict=True))
        return self._add(batch, version)

    def label(self, sample_id: int, y: int) -> bool:
        """Give a sample its label, late or again; return whether it is still here."""
        try:
            with self._database.writing() as connection:
                row = connection.execute(
                    "SELECT y FROM samples WHERE id = ?", (sample_id,)
                ).fetchone()
                if row is not None:
                    connection.execute("UPDATE samples SET y = ? WHERE id = ?", (int(y), sample_id))
                    self._count(int(row[0]), -1)
                    self._count(int(y), 1)
        except sqlite3.DatabaseError as error:
            self._failed(error, "a label")
            return False
        self._own_writes += 1
        return row is not None

    def sample(
        self,
        n: int,
        *,
        how: str = "uniform",
        labelled: bool = True,
        version: str | None = None,
        generator: np.random.Generator | None = None,
    ) -> Samples:
        """Return up to ``n`` different samples.

        Parameters
        ----------
        n : int
            How many.
        how : str
            Registered retrieval: ``uniform``, ``class_balanced``, ``recent``.
        labelled : bool
            Leave out those without a label.
        version : str, optional
            Only those that were added with it.
        generator : numpy Generator, optional
            Draws them; one that is kept makes the draws go on after a restart as without it.
        """
        retrieval = make_retrieval(how)
        ids, labels = self._known(labelled, version)
        chosen = retrieval(ids, labels, n, generator or np.random.default_rng())
        return self.take(ids[chosen].tolist())

    def take(self, ids: Iterable[int]) -> Samples:
        """Return the samples with these ids, in their order; those that are gone are left out."""
        found: dict[int, Any] = {}
        wanted = list(ids)
        for start in range(0, len(wanted), 500):
            part = wanted[start : start + 500]
            marks = ",".join("?" * len(part))
            query = f"SELECT id, y, t, outputs, x FROM samples WHERE id IN ({marks})"
            found |= {row[0]: row for row in self._read(query, part)}
        rows = [found[each] for each in wanted if each in found]
        return self._samples(rows)

    def delete(
        self,
        ids: Iterable[int] | None = None,
        *,
        label: int | None = None,
        before: float | None = None,
        other_than_version: str | None = None,
    ) -> int:
        """Delete samples for which all that is given holds; return how many.

        Parameters
        ----------
        ids : iterable of int, optional
            Only these.
        label : int, optional
            Only those of this class.
        before : float, optional
            Only those observed earlier, in the stream's seconds.
        other_than_version : str, optional
            Only those that were added with another version.
        """
        conditions, values = [], []
        for clause, value in (
            ("y = ?", label), ("t < ?", before), ("version <> ?", other_than_version),
        ):  # fmt: skip
            if value is not None:
                conditions.append(clause)
                values.append(value)
        if ids is not None:
            # Whole numbers, so that the text of the query is safe.
            listed = ",".join(str(int(each)) for each in ids)
            conditions.append(f"id IN ({listed})")
        if not conditions:
            raise StoreError("say what to delete: ids, a label, an age or a version")
        where = " AND ".join(conditions)
        try:
            with self._database.writing() as connection:
                gone = connection.execute(
                    f"SELECT y, COUNT(*) FROM samples WHERE {where} GROUP BY y", values
                ).fetchall()
                connection.execute(f"DELETE FROM samples WHERE {where}", values)
                for y, count in gone:
                    self._count(int(y), -int(count))
        except sqlite3.DatabaseError as error:
            self._failed(error, "a deletion")
            return 0
        self._own_writes += 1
        self._database.shorten_log()
        return sum(int(count) for _, count in gone)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _settle(self) -> None:
        """Take over what the file was made with; write it into a fresh one."""
        database = self._database
        kept = {key: database.get(key) for key in self._settings}
        if not any(kept.values()):
            with database.writing():
                for key, value in self._settings.items():
                    database.put(key, value)
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
            self._encoding = Encoding.from_json(text) if text else None
        except StoreError as error:
            self._start_afresh(str(error))

    def _start_afresh(self, why: str) -> None:
        self._database.put_aside(why)
        self._encoding, self._index = None, None
        self._lost["file was damaged"] += 1
        self._settle()

    def _failed(self, error: sqlite3.DatabaseError, what: str) -> None:
        """Note what could not be written; start afresh where the file is damaged."""
        if is_damage(error):
            self._start_afresh(str(error))
            return
        _LOG.warning("%s could not be written to %s: %s", what, self._database.path, error)

    def _read(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        try:
            return self._database.connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise StoreError(f"cannot read {self._database.path}: {error}") from None
            self._start_afresh(str(error))
            return []

    def _add(self, rows: list[_Row], version: str) -> list[int | None]:
        """Add rows, so many at a time that the log keeps to its bound."""
        ids: list[int | None] = []
        while len(ids) < len(rows):
            size = 0 if self._encoding is None else self._encoding.row_bytes
            # The first sample says how large they are.
            many = self._database.rows_per_transaction(size) if size else 1
            ids += self._add_some(rows[len(ids) : len(ids) + many], version)
        return ids

    def _add_some(self, rows: list[_Row], version: str) -> list[int | None]:
        try:
            ids = self._written(rows, version)
            self._database.shorten_log()
            return ids
        except sqlite3.DatabaseError as error:
            self._failed(error, f"{len(rows)} samples")
            if not is_damage(error):
                self._lost["disk"] += len(rows)
                return [None] * len(rows)
        return self._written(rows, version)

    def _written(self, rows: list[_Row], version: str) -> list[int | None]:
        database, encoding, now = self._database, self._encoding, time.time()
        ids: list[int | None] = []
        with database.writing():
            refused: Counter[str] = Counter()
            seen, last = int(database.get("seen", "0")), int(database.get("last_id", "0"))
            for x, y, t, outputs in rows:
                array, label, when = np.asarray(x), _label(y), now if t is None else float(t)
                if encoding is None:
                    # Another process may have added the first sample.
                    text = database.get("encoding")
                    encoding = (
                        Encoding.from_json(text)
                        if text
                        else Encoding.of(self._encoding_name, array)
                    )
                    problem = encoding.problem(array)
                    if not text and not problem:
                        database.put("encoding", encoding.to_json())
                problem = encoding.problem(array) or _odd(label, when)
                if problem:
                    refused[problem] += 1
                    ids.append(None)
                    if not database.get("encoding"):
                        encoding = None
                    continue
                seen, last = seen + 1, last + 1
                newcomer = Newcomer(label, lottery(self._seed, seen))
                slot = self._place(newcomer, encoding.row_bytes + _extra(outputs))
                if slot is None:
                    ids.append(None)
                    continue
                told = None if outputs is None else np.asarray(outputs, np.float32).tobytes()
                database.connection.execute(
                    _PLACE,
                    (slot or None, last, label, newcomer.draw, when, version, told, encoding.encode(array)),
                )  # fmt: skip
                self._count(label, 1)
                ids.append(last)
            database.put("seen", seen)
            database.put("last_id", last)
            if refused:
                before: Counter[str] = Counter(json.loads(database.get("rejected", "{}")))
                database.put("rejected", json.dumps(before + refused))
        for reason, count in refused.items():
            _LOG.warning("%s samples rejected: %s", count, reason)
        self._encoding = encoding
        self._own_writes += 1
        return ids

    def _place(self, newcomer: Newcomer, row_bytes: int) -> int | None:
        """Return the slot for a newcomer, made free for it; 0 for a new one, None if it is turned away."""
        if self._database.has_room(row_bytes):
            return 0
        slot = self._policy.victim(self._database.connection, newcomer)
        if slot is None:
            return None
        row = self._database.connection.execute(
            "SELECT y FROM samples WHERE slot = ?", (slot,)
        ).fetchone()
        self._count(int(row[0]), -1)
        return slot

    def _count(self, label: int, change: int) -> None:
        self._database.connection.execute(
            "INSERT INTO classes VALUES (?, ?) ON CONFLICT(y) DO UPDATE SET n = n + excluded.n",
            (label, change),
        )

    def _known(
        self, labelled: bool, version: str | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ids and labels of the samples that may be drawn; read again only when something has changed."""
        others = self._read("PRAGMA data_version")
        state = (others, self._own_writes, labelled, version)
        if self._index is None or self._index[0] != state:
            conditions = ["y >= 0"] if labelled else ["1"]
            values: list[object] = []
            if version is not None:
                conditions.append("version = ?")
                values.append(version)
            rows = self._read(
                f"SELECT id, y FROM samples WHERE {' AND '.join(conditions)} ORDER BY id", values
            )
            table = np.array(rows, np.int64).reshape(-1, 2)
            self._index = (state, table[:, 0], table[:, 1])
        return self._index[1], self._index[2]

    def _samples(self, rows: list[Any]) -> Samples:
        if self._encoding is None:
            text = self._database.get("encoding")
            self._encoding = Encoding.from_json(text) if text else None
        if self._encoding is None or not rows:
            shape = () if self._encoding is None else self._encoding.shape
            dtype = np.float32 if self._encoding is None else np.dtype(self._encoding.dtype)
            x = np.zeros((0, *shape), dtype)
        else:
            x = self._encoding.decode([row[4] for row in rows])
        outputs = None
        if rows and all(row[3] is not None for row in rows):
            told = [np.frombuffer(row[3], np.float32) for row in rows]
            # A head that grew says more of later samples.
            if len({len(each) for each in told}) == 1:
                outputs = np.stack(told)
        return Samples(
            ids=np.array([row[0] for row in rows], np.int64),
            x=x,
            y=np.array([row[1] for row in rows], np.int64),
            t=np.array([row[2] for row in rows], np.float64),
            outputs=outputs,
        )


def _label(y: Any) -> int:
    """Return a label as a whole number; less than -1 if it is none."""
    if y is None:
        return UNLABELLED
    value = np.asarray(y)
    if value.dtype.kind in "biu" or (value.dtype.kind == "f" and float(value) == np.floor(value)):
        return int(value)
    return UNLABELLED - 1


def _odd(label: int, when: float) -> str:
    if label < UNLABELLED or label >= 2**31:
        return "the label is no class number"
    return "" if np.isfinite(when) else "the time is not finite"


def _extra(outputs: ArrayLike | None) -> int:
    return 0 if outputs is None else 4 * np.size(outputs)
