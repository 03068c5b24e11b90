"""A bounded, crash-safe memory of a stream on disk."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import StoreError
from fl_elastic.streaming.intake import Refused, checked_label, kept_label, label_of
from fl_elastic.streaming.retrievals import RETRIEVALS
from fl_elastic.streaming.store.changes import Change, Note, Offer, Relabelled, Writer
from fl_elastic.streaming.store.encoding import Encoding, check_encoding
from fl_elastic.streaming.store.policies import STORAGE_POLICIES
from fl_elastic.streaming.store.sqlite import Database, Facts, texts_of

__all__ = ["SampleStore", "Samples"]

_Table = tuple[NDArray[np.int64], NDArray[np.int64]]
# Ids, as many as there are, in one value.
_OF_IDS = "id IN (SELECT value FROM json_each(?))"


@dataclass(frozen=True, eq=False)
class Samples:
    """Some samples of a store; unpacks into inputs and labels.

    Attributes
    ----------
    ids : array of int, shape (N,)
        By which they are labelled or deleted; bigger is newer.
    x : array, shape (N, ...)
        Inputs, or features where the store holds those.
    y : array of int, shape (N,)
        Labels; masked, as in `numpy.ma`, where none has come.
    t : array of float, shape (N,)
        When they were observed, in the stream's own seconds.
    outputs : array of float or None, shape (N, classes)
        What the model said of them when they were stored, if that was kept for all of them.
    """

    ids: NDArray[np.int64]
    x: NDArray[Any]
    y: NDArray[np.int64]
    t: NDArray[np.float64]
    outputs: NDArray[np.float32] | None = None

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter((self.x, self.y))

    def __len__(self) -> int:
        return len(self.ids)


class SampleStore(AbstractContextManager["SampleStore"]):
    """Keeps samples of a stream in a SQLite file that never grows beyond its bound.

    One process may add while another one draws, labels and deletes. A process that is killed loses at most the
    samples of the call it was in. A damaged file is put aside and a fresh one started; a full disk and samples
    that do not fit cost themselves alone, and are counted in `rejected`.

    Parameters
    ----------
    path : path-like
        The file. What it was made with (encoding, policy, seed) has to be given again when it is opened again.
    capacity_bytes : int
        Bound of all that it takes on the disk, at any moment: the file, its write-ahead log and the log's index.
    policy : str
        Registered storage policy: ``reservoir``, ``class_balanced``, ``ring``.
    encoding : {"raw", "fp16", "int8"}
        ``raw`` keeps inputs as they are; the others are for features.
    seed : int
        Of the lottery for places.

    Raises
    ------
    StoreError
        If the capacity is too small, the file cannot be opened, takes more already, or was made with other
        settings.

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
        self, path: str | os.PathLike[str], capacity_bytes: int, *, policy: str = "reservoir",
        encoding: str = "raw", seed: int = 0,
    ) -> None:  # fmt: skip
        check_encoding(encoding)
        made_with = {"policy": policy, "encoding_name": encoding, "seed": str(seed)}
        rule = STORAGE_POLICIES.make(policy)
        self._database = Database(Path(path), int(capacity_bytes), made_with)
        self._writer = Writer(self._database, rule, encoding, seed)
        self._settle: Callable[[], object] = lambda: None
        self._drawable: tuple[object, _Table] | None = None

    def settled_by(self, settle: Callable[[], object]) -> None:
        """Call this before anybody looks: somebody gathers changes to write many of them at once."""
        self._settle = settle

    def __len__(self) -> int:
        return sum(self.classes.values())

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity_bytes(self) -> int:
        """Bound of all that it takes on the disk."""
        return self._database.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What the file, its log and the log's index take on the disk now, gathered changes apart."""
        return self._database.used_bytes()

    @property
    def seen(self) -> int:
        """Samples that were offered and made sense, kept or not."""
        self._settle()
        return self._database.facts().seen

    @property
    def rejected(self) -> dict[str, int]:
        """How many samples made no sense or could not be written, by reason."""
        self._settle()
        return dict(self._database.facts().rejected + self._database.lost)

    @property
    def classes(self) -> dict[int | None, int]:
        """How many samples of each label there are; None for those without."""
        self._settle()
        rows = self._database.read("SELECT y, n FROM classes WHERE n > 0 ORDER BY y")
        return {label_of(y): n for y, n in rows}

    @overload
    def add(
        self, x: ArrayLike, y: int | None = None, t: float | None = None, *,
        outputs: ArrayLike | None = None, version: str = "",
    ) -> int | None: ...  # fmt: skip
    @overload
    def add(
        self, x: ArrayLike, y: Sequence[int] | NDArray[Any], t: ArrayLike | None = None, *,
        outputs: ArrayLike | None = None, version: str = "",
    ) -> list[int | None]: ...  # fmt: skip
    def add(
        self, x: ArrayLike, y: Any = None, t: Any = None, *, outputs: ArrayLike | None = None,
        version: str = "",
    ) -> int | list[int | None] | None:  # fmt: skip
        """Offer a sample, or a batch where ``y`` is a sequence; return the id of each that was kept.

        Parameters
        ----------
        x : array
            One sample, or a batch of them.
        y : int or sequence of int, optional
            Labels, whole numbers; None if it is not known yet.
        t : float or sequence of float, optional
            When it was observed; now, if left out.
        outputs : array, optional
            What the model says of it now, for replay that keeps to it.
        version : str
            What the sample belongs to, such as the frozen prefix that made features; see `sample`.
        """
        if np.ndim(y) == 0:
            return self.change([Offer(x, y, t, outputs)], version)[0]
        inputs, labels = np.asarray(x), np.asanyarray(y)
        times = [t] * len(labels) if t is None or np.ndim(t) == 0 else list(np.asarray(t))
        given = [None] * len(labels) if outputs is None else list(np.asarray(outputs))
        if not len(inputs) == len(labels) == len(times) == len(given):
            raise StoreError(f"{len(inputs)} samples do not fit {len(labels)} labels: give as many")
        batch = [Offer(*row) for row in zip(inputs, labels, times, given, strict=True)]
        return self.change(batch, version)

    def change(
        self, changes: Sequence[Change], version: str = "", note: Note = lambda _: {}
    ) -> list[int | None]:
        """Make changes in their order, in as few transactions as the log's bound allows.

        Returns the id of each whose sample is here, or was until now; None if it was not kept, or is not here.
        """
        self._settle()
        return self._writer.change(changes, version, note)

    def noted(self, key: str) -> str:
        """Return what was last written under a key together with changes; empty for nothing."""
        rows = self._database.read("SELECT value FROM meta WHERE key = ?", key)
        return str(rows[0][0]) if rows else ""

    @property
    def encoding(self) -> str:
        """In which samples are written."""
        return self._writer.encoding

    def as_kept(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return a sample as it would be read back."""
        if self.encoding == "raw":
            return x
        form = self._writer.form() or Encoding.of(self.encoding, x)
        return np.asarray(form.decode([form.encode(x)])[0])

    def fits(self, row_bytes: int) -> bool:
        """Whether a sample of so many bytes is not too large for the capacity."""
        return self._database.bounds.largest_row >= row_bytes

    def label(self, sample_id: int, y: int) -> bool:
        """Give a sample its label, late or again; return whether it is still here.

        Raises
        ------
        StoreError
            If it is no class number.
        """
        try:
            label = checked_label(y)
        except Refused as why:
            raise StoreError(str(why)) from None
        if label is None:
            raise StoreError(f"there is no label for sample {sample_id}: give its class number")
        self._settle()
        # Looked at first, so that a foreign id costs no transaction.
        here = self._database.read(f"SELECT id FROM samples WHERE {_OF_IDS}", _listed([sample_id]))
        return bool(here) and self.change([Relabelled(here[0][0], label)])[0] is not None

    def sample(
        self, n: int, *, how: str = "uniform", labelled: bool = True, version: str | None = None,
        generator: np.random.Generator | None = None,
    ) -> Samples:  # fmt: skip
        """Return up to ``n`` different samples.

        Parameters
        ----------
        n : int
            How many.
        how : str
            Registered retrieval: ``uniform``, ``class_balanced``, ``recent``, ``newest``.
        labelled : bool
            Leave out those without a label.
        version : str, optional
            Only those that were added with it.
        generator : numpy Generator, optional
            Draws them; one that is kept makes the draws go on after a restart as without it.
        """
        chosen = self.draw(n, how=how, labelled=labelled, version=version, generator=generator)
        return self.take(chosen.tolist())

    def draw(
        self, n: int, *, how: str = "uniform", labelled: bool = True, version: str | None = None,
        generator: np.random.Generator | None = None,
    ) -> NDArray[np.int64]:  # fmt: skip
        """Return the ids of the samples that `sample` would return: `take` several draws at once."""
        self._settle()
        retrieval = RETRIEVALS.get(how)
        ids, labels = self._table(labelled, version)
        if not len(ids):
            return ids
        return ids[retrieval(labels, n, generator or np.random.default_rng())]

    def take(self, ids: Iterable[int]) -> Samples:
        """Return the samples with these ids, in their order; those that are gone are left out."""
        self._settle()
        return self.found(ids)

    def found(self, ids: Iterable[int]) -> Samples:
        """Return the samples with these ids that are in the file already; see `take`."""
        wanted = list(ids)
        query = f"SELECT id, y, t, outputs, x FROM samples WHERE {_OF_IDS}"

        def looked() -> Samples:
            connection = self._database.connection
            rows = {row[0]: row for row in connection.execute(query, (_listed(wanted),))}
            # Asked after the rows, which another process may write otherwise by now.
            form = Facts.of(texts_of(connection)).form
            return _samples([rows[each] for each in wanted if each in rows], form)

        return self._database.look(looked)

    def delete(
        self, ids: Iterable[int] | None = None, *, label: int | None = None,
        before: float | None = None, other_than_version: str | None = None,
    ) -> int:  # fmt: skip
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
        self._settle()
        kept = None if label is None else kept_label(label)
        given: dict[str, object] = {
            _OF_IDS: None if ids is None else _listed(ids), "y = ?": kept, "t < ?": before,
            "version <> ?": other_than_version,
        }  # fmt: skip
        given = {clause: value for clause, value in given.items() if value is not None}
        if not given:
            raise StoreError("say what to delete: ids, a label, an age or a version")
        return self._writer.delete(" AND ".join(given), [*given.values()])

    def erase(self, ids: Iterable[int]) -> int:
        """Delete samples so that the file no longer holds their bytes; return how many.

        What is deleted otherwise is overwritten only as others come. The whole file is written anew, which takes as
        much room on the disk again for a while.

        Raises
        ------
        StoreError
            If it could not be: another process reads, or the disk is full.
        """
        gone = self.delete(ids)
        try:
            self._database.compact()
        except sqlite3.Error as error:
            raise StoreError(
                f"{self._database.path} could not be written anew ({error}), and may still hold the bytes of "
                f"samples; {gone} were deleted: stop what else reads it, make room, and erase again"
            ) from None
        return gone

    def close(self) -> None:
        """Close the file; what was committed is in it."""
        self._settle()
        self._database.connection.close()

    def _table(self, labelled: bool, version: str | None) -> _Table:
        """Return ids and labels, of samples that have a label or of all, of one version or of any."""
        state = (self._database.state(), labelled, version)
        if self._drawable is None or self._drawable[0] != state:
            wanted = "(y <> ?3 OR NOT ?1) AND (version = ?2 OR ?2 IS NULL)"
            query = f"SELECT id, y FROM samples WHERE {wanted} ORDER BY id"
            rows = self._database.read(query, labelled, version, kept_label(None))
            ids, labels = np.array(rows, np.int64).reshape(-1, 2).T
            self._drawable = (state, (ids, labels))
        return self._drawable[1]


def _samples(rows: Sequence[Any], form: Encoding | None) -> Samples:
    """Return samples, from rows of id, label, time, outputs and sample as they lie in the file."""
    ids, y, t, told, x = zip(*rows, strict=True) if rows else ((),) * 5
    outputs = None
    # A head that grew says more of later samples.
    if None not in told and len(set(map(len, told))) == 1:
        outputs = np.frombuffer(bytearray().join(told), np.float32).reshape(len(told), -1)
    return Samples(
        ids=np.array(ids, np.int64),
        x=np.zeros(0, np.float32) if form is None else form.decode(x),
        y=_labels(y),
        t=np.array(t, np.float64),
        outputs=outputs,
    )


def _labels(kept: Sequence[int]) -> NDArray[np.int64]:
    labels = [label_of(each) for each in kept]
    if None not in labels:
        return np.array(labels, np.int64)
    return np.ma.array(
        [each or 0 for each in labels], np.int64, mask=[each is None for each in labels]
    )


def _listed(ids: Iterable[int]) -> str:
    return json.dumps([int(each) for each in ids])
