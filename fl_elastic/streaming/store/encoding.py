"""Encoding of samples in the store: unchanged, or as features in fewer bits."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from sqlite3 import DatabaseError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.streaming.intake import Refused
from fl_elastic.training.feature_codec import FeatureCodec

ENCODINGS = ("raw", "fp16", "int8")


@dataclass(frozen=True)
class Encoding:
    """Encoding, shape and type of every sample of a store.

    ``raw`` keeps the bytes unchanged; ``fp16`` and ``int8`` are for features, see `FeatureCodec`.

    >>> form = Encoding("int8", (64,), np.dtype(np.float32))
    >>> ramp = np.linspace(0, 1, 64, dtype=np.float32)
    >>> len(form.encode(ramp)), bool(np.allclose(form.decode([form.encode(ramp)]), ramp, atol=0.01))
    (72, True)
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, name: str, example: NDArray[Any]) -> Encoding:
        """Return the encoding of a store whose first sample is ``example``."""
        return cls(name, example.shape, example.dtype if name == "raw" else np.dtype(np.float32))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return (
            codec.row_bytes
            if (codec := self._codec)
            else math.prod(self.shape) * self.dtype.itemsize
        )

    def refuse_beyond(self, x: NDArray[Any]) -> None:
        """Raise Refused if a number of a sample is too large for the encoding, which would change it."""
        codec = self._codec
        if codec is not None and x.size and float(np.abs(x).max()) > codec.most:
            raise Refused(f"a number is beyond the range of the encoding {self.name}")

    def encode(self, x: NDArray[Any]) -> bytes:
        """Return the bytes of a sample of this shape and type."""
        codec = self._codec
        if codec is None:
            return x.tobytes()
        return bytes(codec.encode(torch.from_numpy(x)[None]).numpy().tobytes())

    def decode(self, rows: Sequence[bytes]) -> NDArray[Any]:
        """Return samples, shape (N, ...); raise sqlite3.DatabaseError if a row has another length."""
        if not {len(row) for row in rows} <= {self.row_bytes}:
            raise DatabaseError("a stored sample has another length than the others")
        table = np.frombuffer(bytearray().join(rows), np.uint8).reshape(len(rows), self.row_bytes)
        codec = self._codec
        if codec is None:
            return table.view(self.dtype).reshape(len(rows), *self.shape)
        return np.asarray(codec.decode(torch.from_numpy(table)).numpy())

    @cached_property
    def _codec(self) -> FeatureCodec | None:
        return None if self.name == "raw" else FeatureCodec(self.name, self.shape)

    def to_json(self) -> str:
        """Return the encoding as text."""
        return json.dumps({"name": self.name, "shape": self.shape, "dtype": self.dtype.str})

    @classmethod
    @lru_cache
    def from_json(cls, text: str) -> Encoding:
        """Read the text of `to_json`; raise sqlite3.DatabaseError for any other text."""
        try:
            found = json.loads(text)
            form = cls(
                str(found["name"]), tuple(map(int, found["shape"])), np.dtype(found["dtype"])
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DatabaseError(f"the form of stored samples cannot be read: {error}") from None
        known = form.name in ENCODINGS and form.dtype.kind in "biuf"
        if not known or any(side < 0 for side in form.shape):
            raise DatabaseError(f"the form of stored samples is unknown: {text[:80]}")
        return form
