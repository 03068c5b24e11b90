"""How the numbers of a partial update are written."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.registry import Registry

__all__ = ["Codec", "Fp16", "Fp32", "codecs", "make_codec", "register_codec"]

_Floats = NDArray[np.float32]


class Codec(ABC):
    """Writes one tensor as bytes of a known length, and reads it back."""

    @abstractmethod
    def encode(self, values: _Floats) -> bytes:
        """Return the bytes of ``values``; raises UpdateError if they cannot be represented."""

    @abstractmethod
    def size(self, shape: tuple[int, ...]) -> int:
        """Return how many bytes a tensor of this shape takes."""

    @abstractmethod
    def decode(self, data: memoryview, shape: tuple[int, ...]) -> _Floats:
        """Return the float32 tensor written in ``data``, which has ``size(shape)`` bytes."""


_REGISTRY: Registry[type[Codec]] = Registry("codec")
register_codec = _REGISTRY.register


def codecs() -> list[str]:
    """Return the names of the registered codecs."""
    return _REGISTRY.names()


def make_codec(name: str) -> Codec:
    """Return the codec registered as ``name``."""
    return _REGISTRY.get(name)()


class _Raw(Codec):
    """Plain little-endian floating point numbers."""

    dtype: str

    def encode(self, values: _Floats) -> bytes:
        """Return ``values`` as little-endian numbers."""
        with np.errstate(over="ignore"):
            written = values.astype(self.dtype)
        if not np.isfinite(written).all():
            raise UpdateError(
                f"values up to {np.abs(values).max():.3g} do not fit {np.dtype(self.dtype).name}; "
                "send them as fp32, or look for a training run that diverged"
            )
        return written.tobytes()

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of values times their width."""
        return int(np.prod(shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> _Floats:
        """Return the numbers as float32 in the given shape."""
        return np.frombuffer(data, dtype=self.dtype).reshape(shape).astype(np.float32)


@register_codec("fp32")
class Fp32(_Raw):
    """Single precision, exact for float32 models."""

    dtype = "<f4"


@register_codec("fp16")
class Fp16(_Raw):
    """Half precision: half the bytes; changes smaller than 6e-8 are lost."""

    dtype = "<f2"
