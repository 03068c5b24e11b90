"""The codec interface (write one tensor as bytes of a known length, and read it back), and the plain codecs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.registry import Factories

_Floats = NDArray[np.float32]
_LARGE = 1 << 16
Memory = Callable[[int], _Floats]
"""Returns a writable array of the given size."""


class Codec(ABC):
    """Writes one tensor as bytes of a known length, and reads it back.

    Attributes
    ----------
    lossy : bool
        Whether float32 numbers may change by encoding and decoding.
    unbiased : bool
        Whether the expected value of the decoded numbers, over generators, equals the original ones.
    sparse : bool
        Whether zeros take no bytes, so that slices of zeros need not be left out before encoding.
    for_statistics : bool
        Whether the codec may be used for running statistics; if not, they are sent as fp32.
    for_weights : bool
        Whether the codec may be used for a model's weights, not only for changes of them.
    """

    lossy: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    for_statistics: ClassVar[bool] = False
    for_weights: ClassVar[bool] = False

    @abstractmethod
    def encode(self, values: _Floats, generator: np.random.Generator) -> bytes:
        """Return the bytes of ``values``, of any shape; raise UpdateError if they cannot be represented.

        All randomness comes from ``generator``.
        """

    @property
    def share(self) -> float:
        """Bytes of a large vector relative to fp32."""
        return self.size((_LARGE,)) / (4 * _LARGE)

    @abstractmethod
    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of a tensor of this shape."""

    @abstractmethod
    def decode(self, data: memoryview, shape: tuple[int, ...]) -> _Floats:
        """Return the float32 tensor written in ``data``, which has ``size(shape)`` bytes.

        Raises
        ------
        UpdateError
            If ``data`` cannot be the result of `encode`. Numbers that are not finite may be returned; the caller
            refuses them.
        """

    def decode_into(self, data: memoryview, values: _Floats) -> None:
        """Write the result of `decode` into ``values``, which has the tensor's shape."""
        values[...] = self.decode(data, values.shape)

    def decode_together(self, data: memoryview, memory: Memory) -> _Floats | None:
        """Return the numbers of consecutively written tensors as one array; None if the codec cannot do that.

        The caller does not use ``data`` afterwards, so the result may be a view of it; otherwise it lies in
        ``memory``. The default is None, for codecs that do not write number by number.
        """
        del data, memory
        return None


_OWN = {
    "bf16": "bf16",
    "fp16": "base",
    "fp32": "base",
    "int8": "int8",
    "topk": "topk",
}

CODECS: Factories[Codec] = Factories(
    "codec", modules={name: f"fl_elastic.update.codecs.{module}" for name, module in _OWN.items()}
)
"""Codecs by name."""


def number_of(shape: tuple[int, ...]) -> int:
    """Return the count of numbers of a tensor of this shape.

    >>> number_of(()), number_of((3, 0)), number_of((2, 5))
    (1, 0, 10)
    """
    return math.prod(shape)


def finite(values: NDArray[Any], written_as: str) -> _Floats:
    """Return ``values`` as a flat array of float32; raise UpdateError unless all are finite in ``written_as``."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if not np.isfinite(flat).all():
        raise does_not_fit(flat, written_as)
    return flat


def does_not_fit(values: NDArray[Any], written_as: str) -> UpdateError:
    """Return the error for ``values`` that are beyond the range of ``written_as``, or not finite."""
    return UpdateError(
        f"values up to {np.abs(values).max():.3g} do not fit {written_as}; "
        "send them as fp32, or look for a training run that diverged"
    )


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
