"""A bounded store of the features at a cut, in memory or in a mapped file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.errors import BudgetError
from fl_elastic.groups.forward import tensor_bytes
from fl_elastic.groups.sample_ids import SampleId
from fl_elastic.training.feature_codec import FeatureCodec

__all__ = ["FeatureCache", "fingerprint"]


def fingerprint(modules: Sequence[nn.Module], place: str) -> bytes:
    """Return a digest of the weights and buffers of ``modules`` and of where they end."""
    digest = hashlib.blake2b(place.encode(), digest_size=16)
    for module in modules:
        for name, tensor in module.state_dict(keep_vars=True).items():
            digest.update(name.encode())
            digest.update(tensor_bytes(tensor))
    return digest.digest()


class FeatureCache:
    """Features by sample id, for one prefix at a time; never larger than its bound.

    Once the bound is reached nothing more is taken in, and what is missing is computed each time: with a bound
    below one epoch, throwing out old rows for new ones would leave no row to find again.

    Parameters
    ----------
    limit_bytes : int
        What all rows together may take.
    precision : {"fp32", "fp16", "int8"}
        See `FeatureCodec`.
    path : path-like, optional
        File that holds the rows; memory if left out. It is removed by `close`.

    Raises
    ------
    BudgetError
        If the bound is not positive or the precision unknown.

    Examples
    --------
    >>> cache = FeatureCache(1024, "fp32")
    >>> cache.prepare(b"weights of today", (2, 2), examples=10)
    10
    >>> cache.store([(1, 2)], torch.ones(1, 2, 2))
    >>> cache.rows([(1, 2), (3, 4)])
    [0, None]
    """

    def __init__(
        self,
        limit_bytes: int,
        precision: str = "fp16",
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if limit_bytes <= 0:
            raise BudgetError(f"a feature cache of {limit_bytes} bytes holds nothing; leave it out")
        FeatureCodec(precision, (1,))
        self.limit_bytes = limit_bytes
        self.precision = precision
        self._path = None if path is None else Path(path)
        self._codec: FeatureCodec | None = None
        self._prefix = b""
        self._rows: Tensor | None = None
        self._dtype = torch.float32
        self._place: dict[SampleId, int] = {}

    def __len__(self) -> int:
        return len(self._place)

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that are filled."""
        return 0 if self._codec is None else len(self) * self._codec.row_bytes

    def capacity(self, shape: tuple[int, ...]) -> int:
        """Return how many examples with features of this shape fit the bound."""
        return self.limit_bytes // FeatureCodec(self.precision, shape).row_bytes

    def prepare(self, prefix: bytes, shape: tuple[int, ...], examples: int) -> int:
        """Make room for the features of one prefix and return how many examples fit.

        What is stored stays if it belongs to the same prefix and shape; else it is dropped.

        Raises
        ------
        BudgetError
            If not even one example fits, or the file cannot have its size (a full disk).
        """
        codec = FeatureCodec(self.precision, shape)
        if self._rows is not None and self._codec == codec and self._prefix == prefix:
            return len(self._rows)
        capacity = min(self.capacity(shape), examples)
        if capacity < 1:
            raise BudgetError(
                f"a feature cache of {self.limit_bytes} bytes does not hold one example of "
                f"{codec.row_bytes} bytes: allow at least {codec.row_bytes * examples} for all"
            )
        self.close()
        self._rows = self._room(capacity, codec.row_bytes)
        self._codec, self._prefix = codec, prefix
        return capacity

    def rows(self, ids: Sequence[SampleId]) -> list[int | None]:
        """Return the row of each id, None where it is not stored."""
        return [self._place.get(one) for one in ids]

    def read(self, rows: Sequence[int]) -> Tensor:
        """Return the features in the given rows, shape (len(rows), *shape), in the type they were stored from."""
        if self._codec is None or self._rows is None:
            raise BudgetError("the feature cache holds nothing yet: call prepare first")
        stored = self._codec.decode(self._rows[torch.tensor(rows, dtype=torch.long)])
        return stored.to(self._dtype)

    def store(self, ids: Sequence[SampleId], features: Tensor) -> None:
        """Take in features while there is room; ids that are stored already are passed over."""
        if self._codec is None or self._rows is None:
            return
        new = {one: i for i, one in enumerate(ids) if one not in self._place}
        fitting = list(new.items())[: len(self._rows) - len(self._place)]
        if fitting:
            self._dtype = features.dtype
            first = len(self._place)
            encoded = self._codec.encode(features[[i for _, i in fitting]])
            self._rows[first : first + len(fitting)] = encoded
            self._place.update({one: first + i for i, (one, _) in enumerate(fitting)})

    def close(self) -> None:
        """Drop everything, and the file."""
        self._rows, self._codec, self._prefix, self._place = None, None, b"", {}
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _room(self, capacity: int, row_bytes: int) -> Tensor:
        if self._path is None:
            return torch.empty(capacity, row_bytes, dtype=torch.uint8)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "wb") as file:
                # A sparse file would hit a full disk later, as a signal that nobody can catch.
                os.posix_fallocate(file.fileno(), 0, capacity * row_bytes)
            mapped = np.memmap(self._path, dtype=np.uint8, mode="r+", shape=(capacity, row_bytes))
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise BudgetError(
                f"a feature cache of {capacity * row_bytes} bytes cannot be made at {self._path}: "
                f"{error.strerror}; free some space or lower its bound"
            ) from None
        return torch.from_numpy(mapped)
