"""A bounded store of the features at a cut, in memory or in a file that outlives the process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.errors import BudgetError
from fl_elastic.groups.sample_ids import SampleId
from fl_elastic.state.files import only_one, private_file
from fl_elastic.training.feature_codec import FeatureCodec

__all__ = ["FeatureStore"]

_LOG = logging.getLogger("fl_elastic")
# A file begins with its facts and their digest; each row with its sample's id and a digest of id and features.
_MAGIC, _FACTS = b"fl_elastic features 1\n", 4096
_DIGEST, _ID = 16, 16
_CHECK = 8


class FeatureStore:
    """Features by sample id, for one prefix at a time; never larger than its bound.

    Once the bound is reached nothing more is taken in, and what is missing is computed each time: with a bound
    below one epoch, throwing out old rows for new ones would leave no row to find again.

    A file is found again by the next process, whenever this one is killed: every row says whose features it holds
    and proves that they are whole and of this prefix, or it is computed anew. One process uses it at a time.

    Parameters
    ----------
    limit_bytes : int
        What all rows together may take.
    precision : {"fp32", "fp16", "int8"}
        See `FeatureCodec`.
    path : path-like, optional
        File that holds the rows and stays; memory if left out.

    Attributes
    ----------
    unfit : int
        Examples that were not taken in, since the precision does not hold their features.

    Raises
    ------
    BudgetError
        If the bound is not positive or the precision unknown.

    Examples
    --------
    >>> store = FeatureStore(1024, "fp32")
    >>> store.prepare(b"weights of today", (2, 2), examples=10)
    10
    >>> store.store([(1, 2)], torch.ones(1, 2, 2))
    >>> places, features = store.read([(1, 2), (3, 4)])
    >>> places, tuple(features.shape)
    ([0], (1, 2, 2))
    """

    def __init__(
        self,
        limit_bytes: int,
        precision: str = "fp16",
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if limit_bytes <= 0:
            raise BudgetError(f"a feature store of {limit_bytes} bytes holds nothing; leave it out")
        FeatureCodec(precision, (1,))
        self.limit_bytes = limit_bytes
        self.precision = precision
        self._path = None if path is None else Path(path)
        self._file: int | None = None
        self._lock = ExitStack()
        self._codec: FeatureCodec | None = None
        self._prefix = b""
        self._rows: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        self._dtype = torch.float32
        self._place: dict[SampleId, int] = {}
        self._free: list[int] = []
        self._proved: set[int] = set()
        self.unfit = 0

    def __len__(self) -> int:
        return len(self._place)

    @property
    def lasts(self) -> bool:
        """Whether what is stored outlives the process."""
        return self._path is not None

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that are filled."""
        return len(self) * int(self._rows.shape[1])

    def capacity(self, shape: tuple[int, ...]) -> int:
        """Return how many examples with features of this shape fit the bound."""
        return self.limit_bytes // self._stride(FeatureCodec(self.precision, shape))

    def prepare(self, prefix: bytes, shape: tuple[int, ...], examples: int) -> int:
        """Make room for the features of one prefix and return how many examples fit.

        What is stored stays if it belongs to the same prefix and shape; else it is dropped.

        Raises
        ------
        BudgetError
            If not even one example fits, or the file cannot be had: a full disk, another process.
        """
        codec = FeatureCodec(self.precision, shape)
        capacity = min(self.capacity(shape), examples)
        same = self._codec == codec and self._prefix == prefix
        if same and len(self._rows) >= capacity:
            return len(self._rows)
        if capacity < 1:
            each = self._stride(codec)
            raise BudgetError(
                f"a feature store of {self.limit_bytes} bytes does not hold one example of "
                f"{each} bytes: allow at least {each * examples} for all"
            )
        self.close()
        self._codec, self._prefix = codec, prefix
        if self._path is None:
            self._rows = np.zeros((capacity, codec.row_bytes), np.uint8)
        else:
            self._open(self._path, capacity)
        self._free = sorted({*range(len(self._rows))} - {*self._place.values()}, reverse=True)
        return len(self._rows)

    def read(self, ids: Sequence[SampleId]) -> tuple[list[int], Tensor]:
        """Return which of the ids are stored, by their place among ``ids``, and their features in that order.

        Features are of shape (found, *shape), in the type they were stored from.
        """
        found = [
            (place, row)
            for place, row in ((place, self._place.get(one)) for place, one in enumerate(ids))
            if row is not None and self._is_whole(ids[place], row)
        ]
        if self._codec is None or not found:
            return [], torch.zeros(0)
        rows = self._rows[[row for _, row in found], -self._codec.row_bytes :]
        features = self._codec.decode(torch.from_numpy(rows)).to(self._dtype)
        return [place for place, _ in found], features

    def store(self, ids: Sequence[SampleId], features: Tensor) -> None:
        """Take in features while there is room; ids that are stored already are passed over.

        So are features of another shape, and those that would not come back as what they are.
        """
        if self._codec is None or tuple(features.shape[1:]) != self._codec.shape:
            return
        if features.dtype != self._dtype:
            # What comes out in another type now is computed in another way, and has another range.
            self.keep_only(())
            self._dtype = features.dtype
            self._write_facts()
        new = {one: i for i, one in enumerate(ids) if one not in self._place}
        fitting = list(new.items())[: len(self._free)]
        if not fitting:
            return
        given = features[[i for _, i in fitting]]
        encoded = self._codec.encode(given)
        kept = self._codec.keeps(given, encoded).tolist()
        self.unfit += kept.count(False)
        for (one, _), payload, whole in zip(fitting, encoded.numpy(), kept, strict=True):
            if not whole:
                continue
            row = self._free.pop()
            self._rows[row, -len(payload) :] = payload
            if self.lasts:
                self._rows[row, :_ID] = np.array(one, np.int64).view(np.uint8)
                self._rows[row, _ID : _ID + _CHECK] = np.frombuffer(self._check(row), np.uint8)
            self._proved.add(row)
            self._place[one] = row

    def keep_only(self, ids: Collection[SampleId]) -> int:
        """Wipe the features of all other samples; return how many."""
        gone = [(one, row) for one, row in self._place.items() if one not in ids]
        for one, row in gone:
            self._rows[row] = 0
            self._let_go(one, row)
        return len(gone)

    def close(self) -> None:
        """Let go of memory and file; what a file holds stays."""
        if self._file is not None:
            os.close(self._file)
            self._lock.close()
        self._file, self._codec, self._prefix = None, None, b""
        self._rows, self._place = np.zeros((0, 0), np.uint8), {}
        self._free, self._proved = [], set()

    def _let_go(self, one: SampleId, row: int) -> None:
        del self._place[one]
        self._proved.discard(row)
        self._free.append(row)

    def _stride(self, codec: FeatureCodec) -> int:
        return codec.row_bytes + (_ID + _CHECK if self.lasts else 0)

    def _is_whole(self, one: SampleId, row: int) -> bool:
        """Whether a row is what was stored; one that is not is let go."""
        if not self.lasts or row in self._proved:
            return True
        if (
            _id_of(self._rows[row]) == one
            and self._check(row) == self._rows[row, _ID : _ID + _CHECK].tobytes()
        ):
            self._proved.add(row)
            return True
        self._let_go(one, row)
        return False

    def _check(self, row: int) -> bytes:
        one, payload = self._rows[row, :_ID].tobytes(), self._rows[row, _ID + _CHECK :].tobytes()
        return hashlib.blake2b(one + payload, digest_size=_CHECK, key=self._prefix).digest()

    def _open(self, path: Path, capacity: int) -> None:
        """Map the file, with what it holds of this prefix, or else anew."""
        assert self._codec is not None
        codec, prefix, stride = self._codec, self._prefix, self._stride(self._codec)
        facts: dict[str, Any] | None = None
        try:
            self._file = private_file(path, os.O_RDWR)
            self._lock.enter_context(only_one(path))
            facts = _read_facts(self._file)
            rows = max(os.fstat(self._file).st_size - _FACTS, 0) // stride
            known = facts is not None and facts == self._facts(facts.get("dtype"))
            if not known or rows * stride > self.limit_bytes:
                # Others' features go before anything of this prefix is written.
                os.ftruncate(self._file, 0)
                facts, rows = None, 0
            if rows < capacity:
                capacity = self._with_room(path, rows, capacity, stride)
            count = max(rows, capacity)
            mapped = np.memmap(path, np.uint8, "r+", offset=_FACTS, shape=(count, stride))
        except OSError as error:
            self._refuse(path, capacity * stride, error, ours=facts is None)
        self._codec, self._prefix, self._rows = codec, prefix, mapped
        if facts is not None:
            self._dtype = getattr(torch, facts["dtype"])
            for row in np.flatnonzero(mapped[:, :_ID].any(axis=1)).tolist():
                self._place[_id_of(mapped[row])] = row
        else:
            self._write_facts()

    def _with_room(self, path: Path, rows: int, capacity: int, stride: int) -> int:
        """Make the file longer and return how many rows it has: those that are there, where the disk is full."""
        assert self._file is not None
        try:
            # A sparse file would hit a full disk later, as a signal that nobody can catch.
            os.posix_fallocate(self._file, 0, _FACTS + capacity * stride)
        except OSError as error:
            if not rows:
                raise
            _LOG.warning("no more features are kept in %s than are there: %s", path, error.strerror)
            return rows
        return capacity

    def _refuse(self, path: Path, size: int, error: OSError, *, ours: bool) -> NoReturn:
        busy, remove = isinstance(error, BlockingIOError), ours and self._file is not None
        self.close()
        if busy:
            raise BudgetError(
                f"the features in {path} are in use by another process: give each client a folder of its own"
            ) from None
        if remove:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise BudgetError(
            f"a feature store of {size} bytes cannot be made at {path}: {error.strerror}; "
            "free some space or lower its bound"
        ) from None

    def _facts(self, dtype: object) -> dict[str, Any]:
        assert self._codec is not None
        return {
            "prefix": self._prefix.hex(),
            "precision": self.precision,
            "shape": list(self._codec.shape),
            "dtype": dtype,
        }

    def _write_facts(self) -> None:
        if self._file is None:
            return
        text = json.dumps(self._facts(str(self._dtype).removeprefix("torch."))).encode()
        page = _MAGIC + hashlib.blake2b(text, digest_size=_DIGEST).digest() + text
        os.pwrite(self._file, page.ljust(_FACTS, b"\0"), 0)


def _read_facts(file: int) -> dict[str, Any] | None:
    """Return what a file says of itself; None if it is new, damaged, or something else."""
    page = os.pread(file, _FACTS, 0)
    digest, text = page[len(_MAGIC) :][:_DIGEST], page[len(_MAGIC) + _DIGEST :].rstrip(b"\0")
    if not page.startswith(_MAGIC) or hashlib.blake2b(text, digest_size=_DIGEST).digest() != digest:
        return None
    facts = json.loads(text)
    return facts if isinstance(facts, dict) else None


def _id_of(row: NDArray[np.uint8]) -> SampleId:
    first, second = row[:_ID].view(np.int64).tolist()
    return first, second
