"""What a message goes through on a bad way, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from fl_elastic.errors import UpdateError


def flipped(data: bytes, position: int) -> bytes:
    """The data with one bit changed."""
    changed = bytearray(data)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


def assert_damage_is_noticed(
    good: bytes,
    read: Callable[[bytes], object],
    bits: Iterable[int] | None = None,
    lengths: Iterable[int] | None = None,
) -> None:
    """A flipped bit, or a message cut off, is an UpdateError; all of them, or those that are named."""
    read(good)
    for position in range(8 * len(good)) if bits is None else bits:
        refused(read, flipped(good, position), f"bit {position}")
    for length in range(len(good)) if lengths is None else lengths:
        refused(read, good[:length], f"{length} bytes")


def refused(read: Callable[[bytes], object], data: bytes, what: str) -> None:
    with pytest.raises(UpdateError):
        read(data)
        pytest.fail(f"not noticed: {what}")


def set_to(part: int, place: Any, value: float) -> Callable[..., None]:
    """A change of one number, or of several, in one of the arrays of a message."""

    def change(*parts: Any) -> None:
        parts[part][place] = value

    return change
