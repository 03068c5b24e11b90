"""Integers from -127 to 127 and one scale per tensor, rounded at random so that errors do not accumulate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.codecs.base import CODECS, Codec, does_not_fit, finite, number_of

_Floats = NDArray[np.float32]
_LARGEST = 127
_MOST = float(np.finfo(np.float32).max)


@CODECS.register("int8")
class Int8(Codec):
    r"""One byte per number and one scale :math:`s = \max|v| / 127` (float32) per tensor.

    Stochastic rounding, :math:`q = \lfloor v/s \rfloor + [u < v/s - \lfloor v/s \rfloor]` with u uniform in
    [0, 1), has the mean v (Alistarh et al. 2017, QSGD): errors of many clients cancel instead of adding up.
    """

    unbiased = True

    def encode(self, values: _Floats, generator: np.random.Generator) -> bytes:
        """Return the scale and the rounded multiples of it."""
        flat = finite(values, "int8")
        if not flat.size:
            return b""
        scale = _scale_of(flat)
        if float(scale) * _LARGEST > _MOST:
            raise does_not_fit(flat, "int8")
        units = flat / scale if scale else np.zeros_like(flat)
        whole = np.floor(units)
        units -= whole
        whole += generator.random(flat.size, dtype=np.float32) < units
        return np.array(scale, dtype="<f4").tobytes() + whole.astype(np.int8).tobytes()

    def size(self, shape: tuple[int, ...]) -> int:
        """Return one byte per number plus four for the scale; 0 for an empty tensor."""
        count = number_of(shape)
        return 4 + count if count else 0

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> _Floats:
        """Return the multiples of the scale; raise UpdateError if scale or multiples are impossible."""
        values = np.empty(shape, dtype=np.float32)
        self.decode_into(data, values)
        return values

    def decode_into(self, data: memoryview, values: _Floats) -> None:
        """Write the multiples of the scale; raise UpdateError if scale or multiples are impossible."""
        if not len(data):
            return
        scale = np.frombuffer(data[:4], dtype="<f4").astype(np.float32)[0]
        multiples = np.frombuffer(data[4:], dtype=np.int8).reshape(values.shape)
        if not 0 <= float(scale) * _LARGEST <= _MOST:
            raise UpdateError(f"scale {scale} is not a positive number: the buffer is damaged")
        if int(multiples.min()) < -_LARGEST:
            raise UpdateError("multiple -128 of a scale is never written: the buffer is damaged")
        np.copyto(values, multiples)
        values *= scale


def _scale_of(flat: _Floats) -> np.float32:
    """Return the smallest float32 such that no number exceeds 127 times it; zero for zeros."""
    largest = float(np.abs(flat).max())
    scale = np.float32(largest / _LARGEST)
    if float(scale) * _LARGEST < largest:
        scale = np.nextafter(scale, np.float32(np.inf))
    return np.float32(scale)
