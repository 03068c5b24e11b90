"""One number per kernel: the mean over its taps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.codecs.base import CODECS, Codec, finite, number_of

__all__ = ["KernelMean"]

_Floats = NDArray[np.float32]
_SINGLE = 4


@CODECS.register("kernel_mean")
class KernelMean(Codec):
    r"""The mean over each spatial kernel, :math:`\bar v_{oi} = \frac{1}{K} \sum_k v_{oik}`, as float32.

    A 3x3 convolution takes a ninth of its bytes. Exact where all K taps of a kernel have the same change, as
    gradient filtering gives up to its tap shares. Every tensor of three or more dimensions whose last ones
    hold more than one number is taken for a convolution's; all others are written whole. What the mean
    loses is never sent by a later round, because the mean of it is zero: no `ErrorFeedback` with this codec.
    """

    feedback = False

    def encode(self, values: _Floats, generator: np.random.Generator) -> bytes:
        """Return the means, or the numbers of a tensor without kernels."""
        del generator
        flat = finite(values, "kernel_mean")
        taps = _taps(values.shape)
        means = flat if taps == 1 else _means(flat, taps)
        return means.astype("<f4").tobytes()

    def size(self, shape: tuple[int, ...]) -> int:
        """Return four bytes per kernel, or per number of a tensor without kernels."""
        return _SINGLE * (number_of(shape) // _taps(shape))

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> _Floats:
        """Return kernels whose taps are all their mean."""
        means = np.frombuffer(data, dtype="<f4").astype(np.float32)
        taps = _taps(shape)
        return (means if taps == 1 else np.repeat(means, taps)).reshape(shape)

    def error_bound(self, values: _Floats) -> float:
        """Return the largest distance of a tap from its kernel's mean."""
        flat = finite(values, "kernel_mean")
        taps = _taps(values.shape)
        if taps == 1:
            return 0.0
        kernels = flat.reshape(-1, taps).astype(np.float64)
        distance = np.abs(kernels - kernels.mean(axis=1, keepdims=True)).max(initial=0.0)
        return float(distance) + float(np.abs(flat).max(initial=0.0)) * 2.0**-24 + 2.0**-150


def _taps(shape: tuple[int, ...]) -> int:
    """Return how many numbers a kernel has, 1 where there are no kernels.

    >>> _taps((8, 4, 3, 3)), _taps((8, 4, 1, 1)), _taps((8, 4)), _taps((8, 4, 0))
    (9, 1, 1, 1)
    """
    return max(1, number_of(shape[2:]))


def _means(flat: _Floats, taps: int) -> _Floats:
    # In double precision, so that kernels of equal taps keep their value bit for bit.
    sums = np.add.reduce(flat.reshape(-1, taps), axis=1, dtype=np.float64)
    return np.asarray(sums / taps, dtype=np.float32)
