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
from fl_elastic.streaming.intake import kept_label, label_of
from fl_elastic.streaming.store.changes import Change, Note, Offer, Writer
from fl_elastic.streaming.store.encoding import ENCODINGS, Encoding
from fl_elastic.streaming.store.policies import STORAGE_POLICIES
from fl_elastic.streaming.store.sqlite import Database, Facts, texts_of

__all__ = ["SampleStore", "Samples"]

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
    """

    ids: NDArray[np.int64]
    x: NDArray[Any]
    y: NDArray[np.int64]

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
    policy : {"reservoir", "class_balanced"}
        Who stays when it is full: each sample with the same chance, or as many of each class as fit.
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
        for what, name, known in (
            ("storage policy", policy, STORAGE_POLICIES), ("encoding", encoding, ENCODINGS),
        ):  # fmt: skip
            if name not in known:
                raise StoreError(f"{what} {name!r} is unknown: known are {', '.join(known)}")
        made_with = {"policy": policy, "encoding_name": encoding, "seed": str(seed)}
        self._database = Database(Path(path), int(capacity_bytes), made_with)
        self._writer = Writer(self._database, policy, encoding, seed)
        self._settle: Callable[[], object] = lambda: None
        self._drawable: tuple[object, NDArray[np.int64]] | None = None

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
    def add(self, x: ArrayLike, y: int | None = None, *, version: str = "") -> int | None: ...
    @overload
    def add(
        self, x: ArrayLike, y: Sequence[int] | NDArray[Any], *, version: str = ""
    ) -> list[int | None]: ...
    def add(
        self, x: ArrayLike, y: Any = None, *, version: str = ""
    ) -> int | list[int | None] | None:
        """Offer a sample, or a batch where ``y`` is a sequence; return the id of each that was kept.

        Parameters
        ----------
        x : array
            One sample, or a batch of them.
        y : int or sequence of int, optional
            Labels, whole numbers; None if it is not known yet.
        version : str
            What the sample belongs to, such as the frozen prefix that made features; see `sample`.
        """
        if np.ndim(y) == 0:
            return self.change([Offer(x, y)], version)[0]
        inputs, labels = np.asarray(x), np.asanyarray(y)
        if len(inputs) != len(labels):
            raise StoreError(f"{len(inputs)} samples do not fit {len(labels)} labels: give as many")
        batch = [Offer(*row) for row in zip(inputs, labels, strict=True)]
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

    def sample(
        self, n: int, *, labelled: bool = True, version: str | None = None,
        generator: np.random.Generator | None = None,
    ) -> Samples:  # fmt: skip
        """Return up to ``n`` different samples, each drawn with the same chance.

        Parameters
        ----------
        n : int
            How many.
        labelled : bool
            Leave out those without a label.
        version : str, optional
            Only those that were added with it.
        generator : numpy Generator, optional
            Draws them; one that is kept makes the draws go on after a restart as without it.
        """
        chosen = self.draw(n, labelled=labelled, version=version, generator=generator)
        return self.take(chosen.tolist())

    def draw(
        self, n: int, *, labelled: bool = True, version: str | None = None,
        generator: np.random.Generator | None = None,
    ) -> NDArray[np.int64]:  # fmt: skip
        """Return the ids of the samples that `sample` would return: `take` several draws at once."""
        ids = self.ids(labelled=labelled, version=version)
        draw = generator or np.random.default_rng()
        # Where there is nothing to draw from, nobody's random numbers move.
        return draw.choice(ids, size=min(n, len(ids)), replace=False) if len(ids) else ids

    def ids(self, *, labelled: bool = True, version: str | None = None) -> NDArray[np.int64]:
        """Return the ids of all samples that `sample` may return, the oldest first."""
        self._settle()
        state = (self._database.state(), labelled, version)
        if self._drawable is None or self._drawable[0] != state:
            wanted = "(y <> ?3 OR NOT ?1) AND (version = ?2 OR ?2 IS NULL)"
            query = f"SELECT id FROM samples WHERE {wanted} ORDER BY id"
            rows = self._database.read(query, labelled, version, kept_label(None))
            self._drawable = (state, np.array(rows, np.int64).reshape(-1))
        return self._drawable[1]

    def take(self, ids: Iterable[int]) -> Samples:
        """Return the samples with these ids, in their order; those that are gone are left out."""
        self._settle()
        return self.found(ids)

    def found(self, ids: Iterable[int]) -> Samples:
        """Return the samples with these ids that are in the file already; see `take`."""
        wanted = list(ids)
        query = f"SELECT id, y, x FROM samples WHERE {_OF_IDS}"

        def looked() -> Samples:
            connection = self._database.connection
            rows = {row[0]: row for row in connection.execute(query, (_listed(wanted),))}
            # Asked after the rows, which another process may write otherwise by now.
            form = Facts.of(texts_of(connection)).form
            return _samples([rows[each] for each in wanted if each in rows], form)

        return self._database.look(looked)

    def delete(
        self, ids: Iterable[int] | None = None, *, other_than_version: str | None = None
    ) -> int:
        """Delete samples for which all that is given holds; return how many.

        Parameters
        ----------
        ids : iterable of int, optional
            Only these.
        other_than_version : str, optional
            Only those that were added with another version.
        """
        self._settle()
        given: dict[str, object] = {
            _OF_IDS: None if ids is None else _listed(ids), "version <> ?": other_than_version,
        }  # fmt: skip
        given = {clause: value for clause, value in given.items() if value is not None}
        if not given:
            raise StoreError("say what to delete: ids or a version")
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


def _samples(rows: Sequence[Any], form: Encoding | None) -> Samples:
    """Return samples, from rows of id, label and sample as they lie in the file."""
    ids, y, x = zip(*rows, strict=True) if rows else ((),) * 3
    return Samples(
        ids=np.array(ids, np.int64),
        x=np.zeros(0, np.float32) if form is None else form.decode(x),
        y=_labels(y),
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
