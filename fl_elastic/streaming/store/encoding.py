"""How a sample lies in the store: as it is, or features in fewer bits."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from sqlite3 import DatabaseError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.errors import StoreError
from fl_elastic.training.feature_codec import FeatureCodec

__all__ = ["ENCODINGS", "Encoding", "check_encoding"]

ENCODINGS = ("raw", "fp16", "int8")


def check_encoding(name: str) -> None:
    """Raise StoreError, which lists the known encodings, if this is none of them."""
    if name not in ENCODINGS:
        raise StoreError(f"encoding {name!r} is unknown: known are {', '.join(ENCODINGS)}")


@dataclass(frozen=True)
class Encoding:
    """Form on disk, shape and type of every sample of a store.

    ``raw`` is bytes as they are; ``fp16`` and ``int8`` are features, as `FeatureCodec` stores them. Rows that were
    written otherwise before, as ``earlier`` says, are told from the others by their lengths.

    >>> whole = Encoding("int8", (64,), np.dtype(np.float32))
    >>> now = whole.written_as("fp16")
    >>> ramp = np.linspace(0, 1, 64, dtype=np.float32)
    >>> rows = [whole.encode(ramp), now.encode(ramp)]
    >>> [len(row) for row in rows], bool(np.allclose(*now.decode(rows), atol=0.01))
    ([72, 128], True)
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    earlier: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, example: NDArray[Any]) -> Encoding:
        """Return the encoding of a store whose first sample this is."""
        return cls(name, example.shape, example.dtype if name == "raw" else np.dtype(np.float32))

    @lru_cache  # noqa: B019 (there are few)
    def written_as(self, name: str) -> Encoding:
        """Return the encoding of samples to come, which can read those that are there.

        Raises
        ------
        StoreError
            If these are no features, or too short for their lengths to tell one form from the other.
        """
        if name == self.name:
            return self
        if self.dtype != np.float32:
            raise StoreError(
                f"samples of type {self.dtype} are no features to be written as {name}"
            )
        now = replace(self, name=name, earlier=tuple(sorted({*self.earlier, self.name} - {name})))
        if len(now._by_length) <= len(now.earlier):
            raise StoreError(
                f"features of {math.prod(self.shape)} numbers take as many bytes in another form as {name}: "
                "keep to one form for them"
            )
        return now

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one sample to come."""
        return self._length(self.name)

    @cached_property
    def most_row_bytes(self) -> int:
        """Bytes of one sample, whichever way it was written."""
        return max(self._by_length)

    @cached_property
    def leave_for_one(self) -> int:
        """How many samples take the room of one to come, at most."""
        return -(-self.row_bytes // max(min(self._by_length), 1))

    def encode(self, x: NDArray[Any]) -> bytes:
        """Return the bytes of a sample of this shape and type."""
        codec = self._codec(self.name)
        if codec is None:
            return x.tobytes()
        return bytes(codec.encode(torch.from_numpy(x)[None]).numpy().tobytes())

    def decode(self, rows: Sequence[bytes]) -> NDArray[Any]:
        """Return samples, shape (N, ...); sqlite3.DatabaseError if a row has a length that none has."""
        if not {len(row) for row in rows} <= self._by_length.keys():
            raise DatabaseError("a stored sample has another length than the others")
        if not self.earlier:
            return self._decoded(self.name, rows)
        found = np.empty((len(rows), *self.shape), self.dtype)
        for length, name in self._by_length.items():
            places = [place for place, row in enumerate(rows) if len(row) == length]
            if places:
                found[places] = self._decoded(name, [rows[place] for place in places])
        return found

    def _decoded(self, name: str, rows: Sequence[bytes]) -> NDArray[Any]:
        table = np.frombuffer(bytearray().join(rows), np.uint8)
        table = table.reshape(len(rows), self._length(name))
        codec = self._codec(name)
        if codec is None:
            return table.view(self.dtype).reshape(len(rows), *self.shape)
        return np.asarray(codec.decode(torch.from_numpy(table)).numpy())

    def _codec(self, name: str) -> FeatureCodec | None:
        return None if name == "raw" else FeatureCodec(name, self.shape)

    def _length(self, name: str) -> int:
        codec = self._codec(name)
        return codec.row_bytes if codec else math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def _by_length(self) -> dict[int, str]:
        return {self._length(name): name for name in (*self.earlier, self.name)}

    def to_json(self) -> str:
        """Return it as text."""
        earlier = {"earlier": self.earlier} if self.earlier else {}
        return json.dumps(
            {"name": self.name, "shape": self.shape, "dtype": self.dtype.str, **earlier}
        )

    @classmethod
    @lru_cache
    def from_json(cls, text: str) -> Encoding:
        """Read what `to_json` wrote; sqlite3.DatabaseError if it is something else."""
        try:
            found = json.loads(text)
            form = cls(
                str(found["name"]), tuple(map(int, found["shape"])), np.dtype(found["dtype"]),
                tuple(map(str, found.get("earlier", ()))),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DatabaseError(f"the form of stored samples cannot be read: {error}") from None
        known = {form.name, *form.earlier} <= {*ENCODINGS} and form.dtype.kind in "biuf"
        if not known or any(side < 0 for side in form.shape):
            raise DatabaseError(f"the form of stored samples means nothing: {text[:80]}")
        return form
