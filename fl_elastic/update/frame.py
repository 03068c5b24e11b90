"""The frame of every packed message: a versioned, checksummed header before one buffer of numbers.

Layout, little-endian: magic ``FLEL``, format version (u16), kind (u8), zero (u8), header length (u32), checksum of
all the rest (16 bytes, see `checksum`), header (JSON, padded with spaces so that a payload of 4 KB or more begins
at a multiple of 64 bytes), payload. There is one buffer rather than one array per tensor, because the cost of
Flower's transport depends on the number of arrays rather than on that of bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import replace
from enum import IntEnum
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from fl_elastic.errors import RegistryError, UpdateError
from fl_elastic.update.codecs.base import CODECS, Codec
from fl_elastic.update.manifest import FLOATS, Manifest

WIRE_VERSION = 5
CHECKSUM_BYTES = 16
_MAGIC = b"FLEL"
_START = struct.Struct("<4sHBBI")
_BEFORE_TEXT = _START.size + CHECKSUM_BYTES
# Long payloads are aligned, so that numbers can be read in place and word by word; short ones are not padded.
_ALIGNMENT, _LONG = 64, 4096
# Most bytes of a header: a fixed part, with room for other ways to write the same JSON, and parts per tensor and
# axis.
_FIXED, _PER_TENSOR, _PER_AXIS = 4096, 128, 32
_WORD = np.dtype("<u8")
# Words per row: odd, so that replacing one constant by another in a whole row always changes the row's sum.
_ROW = 1023
ROW_BYTES = _ROW * _WORD.itemsize
# Number of rows that stay in the processor's cache while they are summed by row and by column.
_ROWS_AT_ONCE = 64


class MessageKind(IntEnum):
    """Content of a message."""

    UPDATE = 1
    WEIGHTS = 2
    CHANGED_WEIGHTS = 3
    HEAD_SUMS = 4
    SQUARES = 5
    PLACES = 6
    NOISY_SUMS = 7


def pack(kind: MessageKind, header: dict[str, Any], payload: Iterable[bytes]) -> bytes:
    """Return a message as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    numbers = b"".join(payload)
    if len(numbers) >= _LONG:
        text += b" " * (-(_BEFORE_TEXT + len(text)) % _ALIGNMENT)
    start = _START.pack(_MAGIC, WIRE_VERSION, kind, 0, len(text))
    return b"".join([start, checksum(start + text, numbers), text, numbers])


def unpack(
    data: bytes | memoryview, manifest: Manifest, *kinds: MessageKind
) -> tuple[MessageKind, dict[str, Any], memoryview]:
    """Return kind, header and payload of a message of one of ``kinds`` about the manifest's model.

    Raises
    ------
    UpdateError
        If the bytes are damaged or truncated, of another format version, kind or model.
    """
    view = memoryview(data).cast("B")
    if len(view) < _BEFORE_TEXT:
        raise UpdateError(f"buffer of {len(view)} bytes is too short to hold a header")
    start = bytes(view[: _START.size])
    magic, version, kind, zero, length = _START.unpack(start)
    if magic != _MAGIC:
        raise UpdateError("buffer does not start with the mark of a packed update")
    if version != WIRE_VERSION:
        raise UpdateError(
            f"wire format version {version}, this side reads {WIRE_VERSION}: use one release everywhere"
        )
    if kind not in kinds:
        expected = " or ".join(str(int(each)) for each in kinds)
        raise UpdateError(f"buffer is of kind {kind}, expected {expected}")
    if zero != 0:
        raise UpdateError(f"reserved byte is {zero}, expected 0: the buffer is damaged")
    most = _longest_header(manifest)
    if length > most:
        raise UpdateError(f"header of {length} bytes, at most {most} for a model of this size")
    body = view[_BEFORE_TEXT:]
    text, numbers = bytes(body[:length]), body[length:]
    if length > len(body) or checksum(start + text, numbers) != view[_START.size : _BEFORE_TEXT]:
        raise UpdateError("checksum does not fit: the buffer is truncated or damaged")
    header = _json_object(text)
    seen = header.get("manifest")
    if seen != manifest.hash:
        raise UpdateError(
            f"manifest {str(seen)[:40]!r}, expected {manifest.hash!r}: "
            f"the other side runs another model version{_difference(seen, manifest)}"
        )
    return MessageKind(kind), header, numbers


def _difference(seen: object, manifest: Manifest) -> str:
    """Describe how the other side's tensors differ, for example in the float64 of some server optimisers."""
    own = {dtype for dtype in manifest.dtypes if dtype in FLOATS}
    for dtype in FLOATS:
        dtypes = tuple(dtype if each in FLOATS else each for each in manifest.dtypes)
        if replace(manifest, dtypes=dtypes).hash == seen:
            return (
                f", with the same tensors in {dtype} and not in {' and '.join(sorted(own))}: begin with "
                "initial_arrays(model), or convert the arrays"
            )
    return ", whose tensors have other names, shapes or dtypes, or another order"


def peek(data: bytes | memoryview) -> dict[str, Any]:
    """Return a message's header without any check; empty if it cannot be read."""
    view = memoryview(data).cast("B")
    if len(view) < _BEFORE_TEXT:
        return {}
    length = _START.unpack(view[: _START.size])[-1]
    try:
        return _json_object(bytes(view[_BEFORE_TEXT : _BEFORE_TEXT + length]))
    except UpdateError:
        return {}


def _longest_header(manifest: Manifest) -> int:
    """Return the most bytes of a header about this model, to check its length before it is read.

    For each tensor it may hold two numbers, an index twice, and a mask along every axis in hexadecimal.
    """
    masks = sum(_PER_AXIS + size // 4 for shape in manifest.shapes for size in shape)
    return _FIXED + _PER_TENSOR * len(manifest) + masks


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise UpdateError("header is not valid JSON") from None
    if not isinstance(header, dict):
        raise UpdateError("header is not a JSON object")
    return header


def field(header: dict[str, Any], name: str, kind: type) -> Any:
    """Return a field of the header; raise UpdateError unless it is of type ``kind``."""
    value = header.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UpdateError(f"header field {name!r} is {str(value)[:40]!r}, expected {kind.__name__}")
    return value


def integers_field(header: dict[str, Any], name: str) -> list[int]:
    """Return a field that is a list of integers."""
    values = field(header, name, list)
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise UpdateError(f"header field {name!r} must be a list of integers")
    return list(values)


def index_field(header: dict[str, Any], name: str, manifest: Manifest) -> list[int]:
    """Return a field that lists tensors of the manifest as increasing indices."""
    indices = integers_field(header, name)
    if any(b <= a for a, b in pairwise(indices)):
        raise UpdateError("tensor indices must be increasing")
    if indices and not 0 <= indices[0] <= indices[-1] < len(manifest):
        outside = indices[0] if indices[0] < 0 else indices[-1]
        raise UpdateError(f"tensor index {outside} is outside the manifest's {len(manifest)}")
    return indices


def codec_field(header: dict[str, Any]) -> Codec:
    """Return the codec that the header names."""
    try:
        return CODECS.make(field(header, "codec", str)[:40])
    except RegistryError as error:
        raise UpdateError(str(error)) from None


def checksum(head: bytes, numbers: bytes | memoryview) -> bytes:
    """Return the checksum of a message.

    Parameters
    ----------
    head : bytes
        Bytes that are digested unchanged.
    numbers : bytes-like
        Bytes that are divided into rows of `ROW_BYTES`. The digest covers the sums of 64-bit words of each row and
        of each column, modulo 2^64, and the bytes after the last whole row themselves.

    Examples
    --------
    >>> rows = bytes(range(256)) * 64
    >>> checksum(b"", rows) == checksum(b"", rows[8:16] + rows[:8] + rows[16:])
    False
    """
    view = memoryview(numbers).cast("B")
    digest = blake2b(head, digest_size=CHECKSUM_BYTES)
    digest.update(struct.pack("<Q", len(view)))
    whole = len(view) // ROW_BYTES
    if whole:
        words = np.frombuffer(view, _WORD, count=whole * _ROW).reshape(whole, _ROW)
        rows, columns = np.empty(whole, _WORD), np.zeros(_ROW, _WORD)
        for start in range(0, whole, _ROWS_AT_ONCE):
            some = words[start : start + _ROWS_AT_ONCE]
            np.add.reduce(some, axis=1, out=rows[start : start + _ROWS_AT_ONCE])
            columns += np.add.reduce(some, axis=0)
        digest.update(rows.tobytes())
        digest.update(columns.tobytes())
    digest.update(view[whole * ROW_BYTES :])
    return digest.digest()
