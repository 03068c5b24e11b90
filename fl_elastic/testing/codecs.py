"""Conformance of codecs: what every way of writing numbers must satisfy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.testing.subjects import Check, instance_of, require
from fl_elastic.update import Codec

__all__ = ["codec_checks"]

Subject = type[Codec] | Codec

_Floats = NDArray[np.float32]
# Largest error of a round trip, as a share of the largest value: what 8 bits per number achieve.
_TOLERANCE = 0.01


def codec_checks() -> list[Check]:
    """Return the checks of a codec; each takes the class or an instance and raises AssertionError.

    Examples
    --------
    >>> from fl_elastic.update.codecs import Fp16
    >>> for check in codec_checks():
    ...     check(Fp16)
    """
    return [
        check_round_trip,
        check_empty,
        check_zero_dimensional,
        check_size_is_exact,
        check_zero_stays_zero,
        check_same_values_give_same_bytes,
        check_values_are_left_as_they_were,
        check_result_owns_its_memory,
        check_not_finite_is_refused,
    ]


def check_round_trip(subject: Subject) -> None:
    """Check that shape and dtype come back exactly, values within 1 % of the largest."""
    for values in _examples():
        back = _through(subject, values)
        require(back.dtype == np.float32, f"float32 comes back as {back.dtype}")
        require(back.shape == values.shape, f"shape {values.shape} comes back as {back.shape}")
        largest = float(np.abs(values).max(initial=0.0))
        error = float(np.abs(back - values).max(initial=0.0))
        require(
            error <= _TOLERANCE * largest, f"an error of {error:.3g} in values up to {largest:.3g}"
        )


def check_empty(subject: Subject) -> None:
    """Check that a tensor without values comes back in its shape."""
    for shape in ((0,), (3, 0), (0, 2, 2)):
        back = _through(subject, np.zeros(shape, dtype=np.float32))
        require(back.shape == shape, f"an empty tensor of shape {shape} comes back as {back.shape}")


def check_zero_dimensional(subject: Subject) -> None:
    """Check that a tensor of one number keeps its shape ``()``."""
    back = _through(subject, np.array(0.25, dtype=np.float32))
    require(back.shape == (), f"a number comes back with shape {back.shape}")
    require(abs(float(back) - 0.25) <= 0.25 * _TOLERANCE, f"0.25 comes back as {float(back)}")


def check_size_is_exact(subject: Subject) -> None:
    """Check that `Codec.size` says before writing how many bytes there will be."""
    codec = instance_of(subject)
    for values in _examples():
        written, promised = len(codec.encode(values)), codec.size(values.shape)
        require(written == promised, f"{written} bytes for {values.shape}, size() says {promised}")


def check_zero_stays_zero(subject: Subject) -> None:
    """Check that weights that did not move do not move on the way either."""
    zeros = np.zeros((4, 5), dtype=np.float32)
    require(not _through(subject, zeros).any(), "zeros come back as something else")


def check_same_values_give_same_bytes(subject: Subject) -> None:
    """Check that the same values are written the same way again."""
    for values in _examples():
        once, again = instance_of(subject).encode(values), instance_of(subject).encode(values)
        require(once == again, "writing the same values twice gives different bytes")


def check_values_are_left_as_they_were(subject: Subject) -> None:
    """Check that writing does not change its input."""
    for values in _examples():
        before = values.copy()
        instance_of(subject).encode(values)
        require(np.array_equal(values, before), "encode() changed the values it was given")


def check_result_owns_its_memory(subject: Subject) -> None:
    """Check that what is read can be changed without altering the message it was read from."""
    codec = instance_of(subject)
    data = bytearray(codec.encode(np.ones(8, dtype=np.float32)))
    before = bytes(data)
    back = codec.decode(memoryview(data), (8,))
    require(back.flags.writeable, "the tensor that was read cannot be written to")
    back += 1
    require(bytes(data) == before, "changing the tensor changes the message it was read from")


def check_not_finite_is_refused(subject: Subject) -> None:
    """Check that NaN and infinity, which would spoil the global model, are an UpdateError."""
    for bad in (np.nan, np.inf, -np.inf):
        try:
            instance_of(subject).encode(np.array([1.0, bad], dtype=np.float32))
        except UpdateError:
            continue
        require(False, f"{bad} was written instead of being refused")


def _through(subject: Subject, values: _Floats) -> _Floats:
    codec = instance_of(subject)
    return codec.decode(memoryview(codec.encode(values)), values.shape)


def _examples() -> Iterator[_Floats]:
    generator = np.random.default_rng(5)
    for shape in ((1,), (7,), (3, 4), (2, 3, 5, 1), (), (0,), (1000,)):
        for scale in (1e-3, 1.0, 100.0):
            yield (scale * generator.standard_normal(shape)).astype(np.float32).reshape(shape)
