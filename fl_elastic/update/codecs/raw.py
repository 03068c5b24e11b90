"""Plain floating point numbers: single and half precision."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.codecs.base import CODECS, Codec, Memory, does_not_fit, number_of

_Floats = NDArray[np.float32]


class _Raw(Codec):
    """Plain little-endian floating point numbers."""

    dtype: ClassVar[str]
    for_statistics = True
    for_weights = True

    def encode(self, values: _Floats, generator: np.random.Generator) -> bytes:
        """Return ``values`` as little-endian numbers."""
        del generator
        with np.errstate(over="ignore"):
            written = values.astype(self.dtype)
        if not np.isfinite(written).all():
            raise does_not_fit(values, np.dtype(self.dtype).name)
        return written.tobytes()

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of values times their width."""
        return number_of(shape) * np.dtype(self.dtype).itemsize

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> _Floats:
        """Return the numbers as float32 in the given shape."""
        return np.frombuffer(data, dtype=self.dtype).reshape(shape).astype(np.float32)

    def decode_together(self, data: memoryview, memory: Memory) -> _Floats:
        """Return all numbers as float32."""
        numbers = np.frombuffer(data, dtype=self.dtype)
        values = memory(numbers.size)
        np.copyto(values, numbers)
        return values


@CODECS.register("fp32")
class Fp32(_Raw):
    """Single precision, exact for float32 models."""

    dtype = "<f4"
    lossy = False
    unbiased = True

    def decode_together(self, data: memoryview, memory: Memory) -> _Floats:
        """Return a view of ``data`` if it is aligned and in native byte order, else a copy."""
        numbers = np.frombuffer(data, dtype=self.dtype)
        as_they_are = numbers.flags.aligned and numbers.dtype.isnative
        return numbers if as_they_are else super().decode_together(data, memory)


@CODECS.register("fp16")
class Fp16(_Raw):
    """Half precision: half the bytes; changes smaller than 6e-8 are lost."""

    dtype = "<f2"
