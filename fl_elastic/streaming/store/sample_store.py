"""A bounded, crash-safe store of samples of a stream on disk."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import StoreError
from fl_elastic.given import whole
from fl_elastic.streaming.intake import kept_label, label_of
from fl_elastic.streaming.store.changes import STORAGE_POLICIES, Change, Note, Offer, Writer
from fl_elastic.streaming.store.encoding import ENCODINGS, Encoding
from fl_elastic.streaming.store.sqlite import Database, Facts, texts_of

# SQL condition that takes any number of ids as a single value, a JSON list.
_OF_IDS = "id IN (SELECT value FROM json_each(?))"


@dataclass(frozen=True, eq=False)
class Samples:
    """Some samples of a store; unpacks into inputs and labels.

    Attributes
    ----------
    ids : array of int, shape (N,)
        Ids for labelling and deleting; larger ones are newer.
    x : array, shape (N, ...)
        Inputs, or features if the store holds features.
    y : array of int, shape (N,)
        Labels; masked, as in `numpy.ma`, for samples without one.
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

    One process may add samples while another one draws, labels and deletes, and threads may share a store. A
    process that is killed loses at most the samples of its current call. A damaged file is renamed, and a new one
    is started. Invalid samples, and samples that do not fit on a full disk, do not affect others and are counted in
    `rejected`.

    Parameters
    ----------
    path : path-like
        The file. An existing file must be opened with the encoding, policy and seed with which it was created.
    capacity_bytes : int
        Most bytes on the disk at any moment: the file, its write-ahead log and the log's index.
    policy : {"reservoir", "class_balanced"}
        Which samples a full store keeps: each with equal probability, or equally many of each class.
    encoding : {"raw", "fp16", "int8"}
        ``raw`` keeps inputs unchanged; the others are for features. Samples with numbers beyond the range of the
        encoding (65,504 for ``fp16``) are rejected.
    seed : int
        Seed of the lottery that decides which samples stay.

    Raises
    ------
    StoreError
        If the capacity is too small, or the file cannot be opened, is already larger, or was made with other
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
        self._database = Database(
            Path(path), _whole(capacity_bytes, "a number of bytes"), made_with
        )
        self._writer = Writer(self._database, policy, encoding, seed)
        self._settle: Callable[[], object] = lambda: None
        self._drawable: tuple[object, NDArray[np.int64]] | None = None

    def settled_by(self, settle: Callable[[], object]) -> None:
        """Call ``settle`` before each later access, so that a caller that collects changes can write them."""
        self._settle = settle

    def __len__(self) -> int:
        return sum(self.classes.values())

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that the store takes on the disk."""
        return self._database.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the file, its log and the log's index on the disk now, without collected changes."""
        return self._database.used_bytes()

    @property
    def seen(self) -> int:
        """Number of valid samples that were offered, kept or not."""
        self._settle()
        return self._database.facts().seen

    @property
    def rejected(self) -> dict[str, int]:
        """Number of samples that were invalid or could not be written, by reason."""
        self._settle()
        return dict(self._database.facts().rejected + self._database.lost)

    @property
    def classes(self) -> dict[int | None, int]:
        """Number of samples by label; None for those without."""
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
        """Offer a sample, or a batch if ``y`` is a sequence; return the id of each, None if it was not kept.

        Parameters
        ----------
        x : array
            One sample, or a batch of them.
        y : int or sequence of int, optional
            Labels, integers; None if not known yet.
        version : str
            Version of the sample, such as that of the frozen prefix that made its features; see `sample`.
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
        """Make changes in order, in as few transactions as the log's bound allows.

        Returns for each change the id of its sample; None if the sample is not in the store. A sample that the
        change has just deleted is returned with its id, too.
        """
        self._settle()
        return self._writer.change(changes, version, note)

    def noted(self, key: str) -> str:
        """Return the text last written under a key together with changes; empty if there is none."""
        rows = self._database.read("SELECT value FROM meta WHERE key = ?", key)
        return str(rows[0][0]) if rows else ""

    @property
    def encoding(self) -> str:
        """Name of the encoding of samples."""
        return self._writer.encoding

    def as_kept(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return a sample as it would be read back from the store."""
        if self.encoding == "raw":
            return x
        form = self._writer.form() or Encoding.of(self.encoding, x)
        return np.asarray(form.decode([form.encode(x)])[0])

    def refuse_beyond(self, x: NDArray[Any]) -> None:
        """Raise Refused if the store's encoding cannot represent a number of this sample."""
        if self.encoding != "raw":
            Encoding.of(self.encoding, x).refuse_beyond(x)

    def fits(self, row_bytes: int) -> bool:
        """Return whether a sample of that many bytes is small enough for the capacity."""
        return self._database.bounds.largest_row >= row_bytes

    def sample(
        self, n: int, *, labelled: bool = True, version: str | None = None,
        generator: np.random.Generator | None = None,
    ) -> Samples:  # fmt: skip
        """Return up to ``n`` distinct samples, each drawn with equal probability.

        Parameters
        ----------
        n : int
            Number of samples.
        labelled : bool
            Whether to leave out samples without a label.
        version : str, optional
            Draw only samples that were added with this version.
        generator : numpy Generator, optional
            Source of the draws; save and restore its state to continue the draws after a restart.

        Raises
        ------
        StoreError
            If ``n`` is not a number of samples.
        """
        chosen = self.draw(n, labelled=labelled, version=version, generator=generator)
        return self.take(chosen.tolist())

    def draw(
        self, n: int, *, labelled: bool = True, version: str | None = None,
        generator: np.random.Generator | None = None,
    ) -> NDArray[np.int64]:  # fmt: skip
        """Return the ids of the samples that `sample` would return, so that one `take` can read several draws."""
        wanted = _whole(n, "a number of samples")
        if wanted < 0:
            raise StoreError(f"{n} samples cannot be drawn: ask for 0 or more")
        ids = self.ids(labelled=labelled, version=version)
        draw = generator or np.random.default_rng()
        # An empty store must not advance the generator.
        return draw.choice(ids, size=min(wanted, len(ids)), replace=False) if len(ids) else ids

    def ids(self, *, labelled: bool = True, version: str | None = None) -> NDArray[np.int64]:
        """Return the ids of all samples that `sample` may return, oldest first."""
        self._settle()
        state = (self._database.state(), labelled, version)
        known = self._drawable
        if known is None or known[0] != state:
            wanted = "(y <> ?3 OR NOT ?1) AND (version = ?2 OR ?2 IS NULL)"
            query = f"SELECT id FROM samples WHERE {wanted} ORDER BY id"
            rows = self._database.read(query, labelled, version, kept_label(None))
            known = self._drawable = (state, np.array(rows, np.int64).reshape(-1))
        return known[1]

    def take(self, ids: Iterable[int]) -> Samples:
        """Return the samples with these ids, in order, without deleted ones; raise StoreError for invalid ids."""
        self._settle()
        return self.found(ids)

    def found(self, ids: Iterable[int]) -> Samples:
        """Return the samples with these ids that are already in the file, without collected changes; see `take`."""
        wanted = _several(ids)
        query = f"SELECT id, y, x FROM samples WHERE {_OF_IDS}"

        def looked() -> Samples:
            connection = self._database.connection
            rows = {row[0]: row for row in connection.execute(query, (_listed(wanted),))}
            # Read after the rows, because another process may have replaced them.
            form = Facts.of(texts_of(connection)).form
            return _samples([rows[each] for each in wanted if each in rows], form)

        return self._database.look(looked)

    def delete(
        self, ids: Iterable[int] | None = None, *, other_than_version: str | None = None
    ) -> int:
        """Delete the samples that match all given conditions; return their number.

        Parameters
        ----------
        ids : iterable of int, optional
            Delete only these.
        other_than_version : str, optional
            Delete only samples that were added with another version.

        Raises
        ------
        StoreError
            If nothing says what to delete, or an id is no whole number.
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
        """Delete samples so that the file no longer holds their bytes; return their number.

        The bytes of samples that `delete` removes stay in the file until others overwrite them. This method
        rewrites the whole file, which temporarily takes the same space on the disk again.

        Raises
        ------
        StoreError
            If the file could not be rewritten: another process reads it, or the disk is full.
        """
        gone = self.delete(ids)
        try:
            self._database.compact()
        except sqlite3.Error as error:
            raise StoreError(
                f"{self._database.path} could not be written anew ({error}), and may still hold the bytes of "
                f"samples; {gone} were deleted: stop other processes that read it, free disk space, and erase again"
            ) from None
        return gone

    def close(self) -> None:
        """Write the collected changes and close the file."""
        self._settle()
        self._database.connection.close()


def settings_of(path: Path) -> dict[str, str]:
    """Return the settings with which a store was made, by name; raise sqlite3.Error if it cannot be read."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as opened:
        return dict(opened.execute("SELECT key, value FROM meta").fetchall())


def _samples(rows: Sequence[Any], form: Encoding | None) -> Samples:
    """Return samples, given rows of id, label and sample from the file."""
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
        [label or 0 for label in labels], np.int64, mask=[label is None for label in labels]
    )


def _listed(ids: Iterable[int]) -> str:
    """Return ids as a JSON list; raise StoreError for an invalid id, because rounding would name another sample."""
    return json.dumps([_whole(each, "an id of a sample") for each in _several(ids)])


def _several(ids: Iterable[int]) -> list[int]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise StoreError(f"ids {ids!r} are not a list: give [{ids!r}]")
    return list(ids)


def _whole(value: object, what: str) -> int:
    """Return a whole number of any type as an int; raise StoreError for anything else."""
    found = whole(value)
    if found is None:
        raise StoreError(f"{value!r} is not {what}: give a whole number")
    return found
