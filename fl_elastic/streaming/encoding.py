"""How a sample lies in the store: as it is, or features in fewer bits."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_elastic.errors import StoreError
from fl_elastic.training.feature_codec import FeatureCodec

__all__ = ["ENCODINGS", "Encoding"]

ENCODINGS = ("raw", "fp16", "int8")
_KINDS = "biuf"


@dataclass(frozen=True)
class Encoding:
    """Shape and type of every sample of a store, and its form on disk.

    Parameters
    ----------
    name : {"raw", "fp16", "int8"}
        ``int8`` holds each channel on its own scale, see `fl_elastic.training.feature_codec.FeatureCodec`; it and
        ``fp16`` are for features.
    shape : tuple of int
        Of one sample.
    dtype : str
        Of what goes in and comes out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, example: NDArray[Any]) -> Encoding:
        """Return the encoding of a store whose first sample this is."""
        if name == "raw":
            return cls(name, example.shape, example.dtype.str)
        return cls(name, example.shape, np.dtype(np.float32).str)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        if self.name == "raw":
            return math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return self._codec.row_bytes

    @property
    def _codec(self) -> FeatureCodec:
        return FeatureCodec(self.name, self.shape)

    def problem(self, x: NDArray[Any]) -> str:
        """Return why an array is no sample of this store; empty if it is one."""
        if x.shape != self.shape:
            return f"shape {x.shape} instead of {self.shape}"
        if x.dtype.kind not in _KINDS:
            return f"type {x.dtype} is no number"
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            return "a number is not finite"
        dtype = np.dtype(self.dtype)
        if x.dtype == dtype:
            return ""
        if self.name == "raw" and not np.can_cast(x.dtype, dtype, "same_kind"):
            return f"type {x.dtype} instead of {dtype}"
        with np.errstate(over="ignore"):
            cast = x.astype(dtype)
        if cast.dtype.kind == "f" and not np.isfinite(cast).all():
            return f"a number is beyond the range of {cast.dtype}"
        return ""

    def encode(self, x: NDArray[Any]) -> bytes:
        """Return the bytes of a sample that has no `problem`."""
        cast = np.ascontiguousarray(x, dtype=np.dtype(self.dtype))
        if self.name == "raw":
            return cast.tobytes()
        return bytes(self._codec.encode(torch.from_numpy(cast)[None]).numpy().tobytes())

    def decode(self, rows: list[bytes]) -> NDArray[Any]:
        """Return samples, shape (N, ...).

        Raises
        ------
        StoreError
            If a row has another length.
        """
        if any(len(row) != self.row_bytes for row in rows):
            raise StoreError("a stored sample has another length than the others")
        if self.name == "raw":
            flat = np.frombuffer(b"".join(rows), dtype=np.dtype(self.dtype))
            return flat.reshape(len(rows), *self.shape).copy()
        table = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy()
        return np.asarray(self._codec.decode(torch.from_numpy(table)).numpy())

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps({"name": self.name, "shape": self.shape, "dtype": self.dtype})

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read what `to_json` wrote.

        Raises
        ------
        StoreError
            If it is something else.
        """
        try:
            found = json.loads(text)
            shape = tuple(int(side) for side in found["shape"])
            name, dtype = str(found["name"]), np.dtype(found["dtype"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"the form of stored samples cannot be read: {error}") from None
        if name not in ENCODINGS or dtype.kind not in _KINDS or any(side < 0 for side in shape):
            raise StoreError(f"the form of stored samples means nothing: {text[:80]}")
        return cls(name, shape, dtype.str)
