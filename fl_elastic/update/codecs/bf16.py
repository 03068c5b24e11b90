"""The upper half of single precision: the same range at 8 significant bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.codecs.base import CODECS, Codec, Memory, does_not_fit, finite, number_of

_Floats = NDArray[np.float32]
_NAME = "bfloat16"
_EXPONENT = np.uint16(0x7F80)


@CODECS.register("bf16")
class Bf16(Codec):
    """The upper 16 bits of float32, rounded to nearest, ties to even: half the bytes at the same range.

    It keeps 8 significant bits of changes down to 1e-38, while fp16 loses all changes below 6e-8.
    """

    for_statistics = True
    for_weights = True

    def encode(self, values: _Floats, generator: np.random.Generator) -> bytes:
        """Return ``values`` as little-endian 16-bit words."""
        del generator
        bits = finite(values, _NAME).view(np.uint32)
        # Add half a step, minus one unless the last kept bit is odd: a tie then ends in an even bit.
        words = ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype("<u2")
        if bool(((words & _EXPONENT) == _EXPONENT).any()):
            raise does_not_fit(values, _NAME)
        return words.tobytes()

    def size(self, shape: tuple[int, ...]) -> int:
        """Return two bytes per number."""
        return 2 * number_of(shape)

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> _Floats:
        """Return the numbers as float32 in the given shape."""
        values = self.decode_together(data, lambda size: np.empty(size, np.float32))
        return values.reshape(shape)

    def decode_together(self, data: memoryview, memory: Memory) -> _Floats:
        """Return all numbers as float32."""
        words = np.frombuffer(data, dtype="<u2")
        values = memory(words.size)
        bits = values.view(np.uint32)
        np.copyto(bits, words)
        bits <<= 16
        return values
