"""Conformance checks of codecs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.testing.subjects import Check, instance_of, require
from fl_elastic.update import Codec

Subject = type[Codec] | Codec

_Floats = NDArray[np.float32]
# Largest error as a share of the largest value: that of a codec that only writes zeros.
_LARGEST_ERROR = 1.0 + 1e-6
_WRITINGS = 400
# Largest error in standard errors of the mean over these writings; rounding to nearest would be off by ten.
_MOST_ERRORS = 5.0


def codec_checks() -> list[Check]:
    """Return the checks of a codec; each takes the class or an instance and raises AssertionError.

    Examples
    --------
    >>> from fl_elastic.update.codecs.base import Fp16
    >>> for check in codec_checks():
    ...     check(Fp16)
    """
    return [
        check_round_trip,
        check_lossless_is_exact,
        check_unbiased_mean_is_the_value,
        check_empty,
        check_zero_dimensional,
        check_size_is_exact,
        check_zero_stays_zero,
        check_same_generator_gives_same_bytes,
        check_values_are_left_as_they_were,
        check_result_owns_its_memory,
        check_any_bytes_are_read_or_refused,
        check_not_finite_is_refused,
    ]


def check_round_trip(subject: Subject) -> None:
    """Check that shape and dtype are preserved, and that no finite value's error exceeds the largest value."""
    for values in _examples():
        back = _through(subject, values)
        require(isinstance(back, np.ndarray), f"an array comes back as {type(back).__name__}")
        require(back.dtype == np.float32, f"float32 comes back as {back.dtype}")
        require(back.shape == values.shape, f"shape {values.shape} comes back as {back.shape}")
        require(bool(np.isfinite(back).all()), "finite values come back as something else")
        error = float(np.abs(back.astype(np.float64) - values).max(initial=0.0))
        most = _LARGEST_ERROR * float(np.abs(values).max(initial=0.0)) + 1e-7
        require(
            error <= most, f"an error of {error:.3g}, more than writing zeros loses: {most:.3g}"
        )


def check_lossless_is_exact(subject: Subject) -> None:
    """Check that a codec that is not lossy returns every bit."""
    if not instance_of(subject).lossy:
        for values in _examples():
            back = _through(subject, values)
            require(back.tobytes() == values.tobytes(), "values change though lossy is False")


def check_unbiased_mean_is_the_value(subject: Subject) -> None:
    """Check that an unbiased codec's mean result over many generators equals each value."""
    codec = instance_of(subject)
    if not codec.unbiased:
        return
    for values in _examples():
        if values.size > 1:
            read = np.array([_through(codec, values, seed) for seed in range(_WRITINGS)])
            read = read.reshape(_WRITINGS, *values.shape)
            mean = read.mean(axis=0, dtype=np.float64)
            error = float(np.abs(mean - values).max(initial=0.0))
            # The largest standard deviation, because a number that was always rounded in the same way has none.
            spread = float(read.std(axis=0, dtype=np.float64).max(initial=0.0))
            expected = _MOST_ERRORS * spread / _WRITINGS**0.5
            rounding = 1e-6 * float(np.abs(values).max(initial=0.0))
            require(
                error <= expected + rounding,
                f"the mean of {_WRITINGS} writings is off by {error:.3g}, more than by chance: {expected:.3g}",
            )


def check_empty(subject: Subject) -> None:
    """Check that a tensor without values keeps its shape."""
    for shape in ((0,), (3, 0), (0, 2, 2), (2, 2, 0), (0, 2, 3, 3)):
        back = _through(subject, np.zeros(shape, dtype=np.float32))
        require(back.shape == shape, f"an empty tensor of shape {shape} comes back as {back.shape}")


def check_zero_dimensional(subject: Subject) -> None:
    """Check that a tensor of one number keeps its shape ``()``."""
    back = _through(subject, np.array(0.25, dtype=np.float32))
    require(back.shape == (), f"a number comes back with shape {back.shape}")


def check_size_is_exact(subject: Subject) -> None:
    """Check that `Codec.size` predicts the number of written bytes."""
    codec = instance_of(subject)
    for values in _examples():
        written, promised = len(_written(codec, values)), codec.size(values.shape)
        require(written == promised, f"{written} bytes for {values.shape}, size() says {promised}")


def check_zero_stays_zero(subject: Subject) -> None:
    """Check that zero deltas stay zero."""
    for shape in ((4, 5), (2, 3, 3, 3), (40,), ()):
        zeros = np.zeros(shape, dtype=np.float32)
        require(not _through(subject, zeros).any(), "zeros come back as something else")


def check_same_generator_gives_same_bytes(subject: Subject) -> None:
    """Check that all randomness comes from the generator."""
    for values in _examples():
        once, again = _written(subject, values, 3), _written(subject, values, 3)
        require(once == again, "writing the same values twice gives different bytes")


def check_values_are_left_as_they_were(subject: Subject) -> None:
    """Check that encoding does not change its input."""
    for values in _examples():
        before = values.copy()
        _written(subject, values)
        require(np.array_equal(values, before), "encode() changed the values it was given")


def check_result_owns_its_memory(subject: Subject) -> None:
    """Check that a decoded tensor can be changed without altering the message from which it was read."""
    codec = instance_of(subject)
    for shape in ((8,), (2, 2, 3, 3), ()):
        data = bytearray(_written(codec, np.ones(shape, dtype=np.float32)))
        before = bytes(data)
        back = codec.decode(memoryview(data), shape)
        require(back.flags.writeable, "the tensor that was read cannot be written to")
        back += 1
        require(bytes(data) == before, "changing the tensor changes the message it was read from")


def check_any_bytes_are_read_or_refused(subject: Subject) -> None:
    """Check that any bytes of the right length give a tensor of the right shape or an UpdateError."""
    codec = instance_of(subject)
    generator = np.random.default_rng(11)
    for values in _examples():
        for data in (
            generator.bytes(codec.size(values.shape)),
            b"\0" * codec.size(values.shape),
            b"\xff" * codec.size(values.shape),
        ):
            try:
                back = codec.decode(memoryview(data), values.shape)
            except UpdateError:
                continue
            except Exception as error:
                raise AssertionError(f"damage gives {error!r}, expected an UpdateError") from error
            require(back.shape == values.shape, f"damage gives the shape {back.shape}")
            require(back.dtype == np.float32, f"damage gives {back.dtype}")


def check_not_finite_is_refused(subject: Subject) -> None:
    """Check that NaN and infinity, which would destroy the global model, raise UpdateError."""
    for bad in (np.nan, np.inf, -np.inf):
        for shape in ((2,), (1, 1, 2, 1), (200,)):
            values = np.ones(shape, dtype=np.float32)
            values.flat[-1] = bad
            try:
                _written(subject, values)
            except UpdateError:
                continue
            require(False, f"{bad} was written instead of being refused")


def _written(subject: Subject, values: _Floats, seed: int = 0) -> bytes:
    return instance_of(subject).encode(values, np.random.default_rng(seed))


def _through(subject: Subject, values: _Floats, seed: int = 0) -> _Floats:
    data = memoryview(_written(subject, values, seed))
    return instance_of(subject).decode(data, values.shape)


def _examples() -> Iterator[_Floats]:
    generator = np.random.default_rng(5)
    for shape in ((1,), (7,), (3, 4), (2, 3, 5, 1), (2, 2, 3, 3), (), (0,), (1000,)):
        for scale in (1e-40, 1e-3, 1.0, 100.0):
            yield (scale * generator.standard_normal(shape)).astype(np.float32).reshape(shape)
