"""How a sample lies in the store: as it is, or features in fewer bits."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.errors import StoreError
from fl_elastic.training.feature_codec import FeatureCodec

__all__ = ["ENCODINGS", "Encoding"]

ENCODINGS = ("raw", "fp16", "int8")


@dataclass(frozen=True)
class Encoding:
    """Form on disk, shape and type of every sample of a store.

    ``raw`` is bytes as they are; ``fp16`` and ``int8`` are features, as `FeatureCodec` stores them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, name: str, example: NDArray[Any]) -> Encoding:
        """Return the encoding of a store whose first sample this is."""
        return cls(name, example.shape, example.dtype if name == "raw" else np.dtype(np.float32))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        codec = self._codec
        return codec.row_bytes if codec else math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def _codec(self) -> FeatureCodec | None:
        return None if self.name == "raw" else FeatureCodec(self.name, self.shape)

    def encode(self, x: NDArray[Any]) -> bytes:
        """Return the bytes of a sample of this shape and type."""
        if self._codec is None:
            return x.tobytes()
        return bytes(self._codec.encode(torch.from_numpy(x)[None]).numpy().tobytes())

    def decode(self, rows: Sequence[bytes]) -> NDArray[Any]:
        """Return samples, shape (N, ...); StoreError if a row has another length."""
        if any(len(row) != self.row_bytes for row in rows):
            raise StoreError("a stored sample has another length than the others")
        table = np.frombuffer(bytearray().join(rows), np.uint8).reshape(len(rows), self.row_bytes)
        if self._codec is None:
            return table.view(self.dtype).reshape(len(rows), *self.shape)
        return np.asarray(self._codec.decode(torch.from_numpy(table)).numpy())

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps({"name": self.name, "shape": self.shape, "dtype": self.dtype.str})

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read what `to_json` wrote; StoreError if it is something else."""
        try:
            found = json.loads(text)
            form = cls(
                str(found["name"]), tuple(map(int, found["shape"])), np.dtype(found["dtype"])
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"the form of stored samples cannot be read: {error}") from None
        known = form.name in ENCODINGS and form.dtype.kind in "biuf"
        if not known or any(side < 0 for side in form.shape):
            raise StoreError(f"the form of stored samples means nothing: {text[:80]}")
        return form
