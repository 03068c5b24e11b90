"""A bounded store of the features at a cut, in memory or in a file that outlives the process."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_elastic.errors import BudgetError
from fl_elastic.groups.sample_ids import SampleId
from fl_elastic.state.rows import Rows, delete, page_for, room_of
from fl_elastic.training.feature_codec import FeatureCodec

_LOG = logging.getLogger("fl_elastic")
_ID = struct.Struct("<qq")
# A row begins with the dtype that its features had before they were encoded.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class FeatureStore:
    """Features by sample id, for one prefix at a time; never larger than its bound.

    Once the bound is reached no more rows are stored, and missing features are computed each time. Replacing old
    rows would not help: with a bound below one epoch, no row would last until it is needed again.

    A file survives the process, whenever it is killed: every row carries a proof that it is whole and belongs to
    this prefix, and is computed anew otherwise. Only one process may use the file at a time.

    Parameters
    ----------
    limit_bytes : int
        Bound on the bytes of all rows together.
    precision : {"fp32", "fp16", "int8"}
        See `FeatureCodec`.
    path : path-like, optional
        File that holds the rows and outlives the process; if left out, rows are held in memory.

    Attributes
    ----------
    unfit : int
        Number of examples that were not stored because the precision cannot represent their features.

    Raises
    ------
    BudgetError
        If the bound is not positive or the precision is unknown.

    Examples
    --------
    >>> store = FeatureStore(1024, "fp32")
    >>> store.prepare(b"weights of today", (2, 2), examples=5)
    5
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
        self._rows: Rows | None = None
        self._codec: FeatureCodec | None = None
        self._prefix = b""
        self._capacity = 0
        self._dtype: torch.dtype | None = None
        self.unfit = 0

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows.places)

    @property
    def lasts(self) -> bool:
        """Whether the stored features outlive the process."""
        return self._path is not None

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that are filled."""
        return 0 if self._codec is None else len(self) * _stride(self._codec)

    def capacity(self, shape: tuple[int, ...]) -> int:
        """Return how many examples with features of this shape fit the bound."""
        return self.limit_bytes // _stride(FeatureCodec(self.precision, shape))

    def prepare(self, prefix: bytes, shape: tuple[int, ...], examples: int) -> int:
        """Make room for the features of the prefix with this digest, and return how many examples fit.

        Stored features stay if prefix and shape are the same; otherwise they are dropped.

        Raises
        ------
        BudgetError
            If not even one example fits, or the file cannot be opened (full disk, used by another process).
        """
        codec = FeatureCodec(self.precision, shape)
        capacity, stride = min(self.capacity(shape), examples), _stride(codec)
        if capacity < 1:
            raise BudgetError(
                f"a feature store of {self.limit_bytes} bytes does not hold one example of "
                f"{stride} bytes: allow at least {stride * examples} for all"
            )
        if self._rows is None or self._codec != codec or self._prefix != prefix:
            self.close()
            self._rows = self._opened(codec, prefix, capacity * stride)
            self._codec, self._prefix, self._capacity = codec, prefix, 0
            if len(self) > self.capacity(shape):
                self.keep_only(())
        if self._path is not None and _free(self._path) < (capacity - len(self)) * stride:
            capacity = self._without_room(self._path, capacity * stride)
        self._capacity = max(self._capacity, capacity, len(self))
        return self._capacity

    def read(self, ids: Sequence[SampleId]) -> tuple[list[int], Tensor]:
        """Return the positions in ``ids`` of the stored samples, and their features in that order.

        Features have shape (found, *shape) and the dtype that they had when stored.
        """
        if self._codec is None or self._rows is None:
            return [], torch.zeros(0)
        rows = self._rows.read([_ID.pack(*one) for one in ids])
        found = {place: row for place, row in enumerate(rows) if row is not None}
        if not found:
            return [], torch.zeros(0)
        # All rows have one dtype: `store` deletes them when features of another dtype come.
        self._dtype = _DTYPES[next(iter(found.values()))[0]]
        data = np.frombuffer(b"".join(found.values()), np.uint8).reshape(len(found), -1)[:, 1:]
        features = self._codec.decode(torch.from_numpy(data.copy()))
        return list(found), features.to(self._dtype)

    def store(self, ids: Sequence[SampleId], features: Tensor) -> None:
        """Store features while there is room; ids that are already stored are skipped.

        Features of another shape, of a dtype that is not floating point, or that the precision cannot represent are
        skipped too.
        """
        if self._codec is None or self._rows is None or features.dtype not in _DTYPES:
            return
        if tuple(features.shape[1:]) != self._codec.shape:
            return
        if self._dtype is None:
            # Reading a row that an earlier process stored sets the dtype.
            self.read([_ID.unpack(place) for place in islice(self._rows.places, 1)])
        if features.dtype != self._dtype:
            # Another dtype means that features are computed in another way, and have another range.
            self.keep_only(())
            self._dtype = features.dtype
        if self._rows is None:
            return
        new = {_ID.pack(*one): i for i, one in enumerate(ids)}
        self._remove_damaged(self._rows, [key for key in new if key in self._rows.places])
        new = {key: i for key, i in new.items() if key not in self._rows.places}
        fitting = list(new.items())[: self._capacity - len(self)]
        if not fitting:
            return
        given = features[[i for _, i in fitting]]
        encoded = self._codec.encode(given)
        kept = self._codec.keeps(given, encoded).tolist()
        self.unfit += kept.count(False)
        begin = bytes([_DTYPES.index(features.dtype)])
        rows = zip(fitting, encoded.numpy(), kept, strict=True)
        try:
            self._rows.add([(key, begin + row.tobytes()) for (key, _), row, whole in rows if whole])
        except OSError as error:
            _LOG.warning(
                "%s keeps the features of %s examples and takes no more: %s",
                self._path, len(self), error.strerror,
            )  # fmt: skip
            self._capacity = len(self)

    def _remove_damaged(self, rows: Rows, keys: Sequence[bytes]) -> None:
        found = zip(keys, rows.read(keys), strict=True)
        with suppress(OSError):
            rows.remove([key for key, data in found if data is None])

    def keep_only(self, ids: Collection[SampleId]) -> int:
        """Delete the features of all other samples and return their number; if this fails, delete the file."""
        if self._rows is None:
            return 0
        kept, count = {_ID.pack(*one) for one in ids}, len(self)
        gone = [key for key in self._rows.places if key not in kept]
        try:
            self._rows.remove(gone)
        except OSError as error:
            _LOG.warning(
                "%s is deleted, because single features cannot be deleted: %s",
                self._path,
                error.strerror,
            )
            self.close()
            if self._path is not None:
                delete(self._path)
        return count - len(self)

    def close(self) -> None:
        """Release the memory or the file; the file's rows stay."""
        if self._rows is not None:
            self._rows.close()
        self._rows, self._codec, self._prefix, self._dtype = None, None, b"", None

    def _opened(self, codec: FeatureCodec, prefix: bytes, size: int) -> Rows:
        subject = json.dumps([prefix.hex(), codec.precision, codec.shape]).encode()
        page = page_for(1 + codec.row_bytes)
        try:
            return Rows(self._path, subject, most=self.limit_bytes, page=page)
        except BlockingIOError:
            raise BudgetError(
                f"the features in {self._path} are in use by another process: give each client a folder of its own"
            ) from None
        except OSError as error:
            raise _cannot_be_made(self._path, size, error.strerror) from None

    def _without_room(self, path: Path, size: int) -> int:
        """Return the number of rows that are stored now, the limit of a store whose disk is full.

        Raises
        ------
        BudgetError
            If no row is stored.
        """
        if not len(self):
            self.close()
            delete(path)
            raise _cannot_be_made(path, size, os.strerror(errno.ENOSPC))
        _LOG.warning("disk full: %s keeps the features of %s examples", path, len(self))
        return len(self)


def _free(path: Path) -> int:
    return shutil.disk_usage(path.parent).free


def _cannot_be_made(path: Path | None, size: int, why: str | None) -> BudgetError:
    return BudgetError(
        f"a feature store of {size} bytes cannot be made at {path}: {why}; free some space or lower its bound"
    )


def _stride(codec: FeatureCodec) -> int:
    size = 1 + codec.row_bytes
    return room_of(size, page_for(size))
