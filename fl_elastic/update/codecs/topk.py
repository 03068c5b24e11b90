"""The few largest numbers of each tensor, and their indices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.codecs.base import CODECS, Codec, finite, number_of

_Floats = NDArray[np.float32]
_ONE_OF = 16


@CODECS.register("topk")
class TopK(Codec):
    """The largest sixteenth of the numbers of each tensor, at least one; the others are zero.

    The bytes are a scale (float32), the numbers as half-precision shares of it, and their increasing indices in the
    flattened tensor, as u16 if that suffices, else as u32. Use it with `ErrorFeedback`, which keeps the omitted
    numbers for the next round (Stich et al. 2018, sparsified SGD with memory).
    """

    # The kept share is relative to all numbers of a tensor: if slices were left out before, fewer would be kept.
    sparse = True

    def encode(self, values: _Floats, generator: np.random.Generator) -> bytes:
        """Return scale, shares and indices."""
        del generator
        flat = finite(values, "topk")
        if not flat.size:
            return b""
        magnitude = np.abs(flat)
        indices = _largest(magnitude, _count(flat.size))
        scale = np.float32(magnitude.max())
        shares = flat[indices] / (scale or np.float32(1))
        written = indices.astype(_index_dtype(flat.size)).tobytes()
        return np.array(scale, dtype="<f4").tobytes() + shares.astype("<f2").tobytes() + written

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a scale and of a share and an index per kept number."""
        total = number_of(shape)
        return 4 + _count(total) * (2 + _index_dtype(total).itemsize) if total else 0

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> _Floats:
        """Return the kept numbers among zeros.

        Raises
        ------
        UpdateError
            If the scale or a share is impossible, or the indices do not increase or leave the tensor.
        """
        total = number_of(shape)
        flat = np.zeros(total, dtype=np.float32)
        if total:
            after_shares = 4 + 2 * _count(total)
            scale = np.frombuffer(data[:4], dtype="<f4").astype(np.float32)[0]
            shares = np.frombuffer(data[4:after_shares], dtype="<f2").astype(np.float32)
            indices = np.frombuffer(data[after_shares:], dtype=_index_dtype(total)).astype(np.int64)
            if not 0 <= scale < np.inf:
                raise UpdateError(f"scale {scale} is not a positive number: the buffer is damaged")
            # This form of the comparison also refuses NaN.
            if not bool((np.abs(shares) <= 1).all()):
                raise UpdateError(
                    "a share of the scale is not within -1 to 1: the buffer is damaged"
                )
            if indices[-1] >= total or bool((np.diff(indices) <= 0).any()):
                raise UpdateError(
                    f"indices of {len(indices)} numbers must increase and stay below {total}"
                )
            flat[indices] = shares * scale
        return flat.reshape(shape)


def _count(total: int) -> int:
    """Return how many of ``total`` numbers are kept."""
    return max(1, total // _ONE_OF)


def _index_dtype(total: int) -> np.dtype[Any]:
    return np.dtype("<u2" if total <= 2**16 else "<u4")


def _largest(magnitude: _Floats, count: int) -> NDArray[np.int64]:
    """Return the increasing indices of the ``count`` largest numbers; among equal ones, the first."""
    threshold = np.partition(magnitude, magnitude.size - count)[magnitude.size - count]
    above = np.flatnonzero(magnitude > threshold)
    equal = np.flatnonzero(magnitude == threshold)
    return np.sort(np.concatenate([above, equal[: count - above.size]]))
