"""The file format of state on disk: facts, named arrays, and a digest of both.

Layout, little-endian: magic ``FLEA``, format version (u16), zero (u16), length of the text (u32), BLAKE2b digest of
all the rest (32 bytes), text (JSON: kind and version of the content, facts, a table with name, dtype and shape of
each array), the arrays' numbers one after the other.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fl_elastic.errors import ArchiveError, ArchiveVersionError
from fl_elastic.state.files import OWNER_ONLY, write_atomically

if TYPE_CHECKING:
    # Imported lazily: the command line uses this module too, and must start without numpy.
    import numpy as np
    from numpy.typing import NDArray


_MAGIC, _FORMAT = b"FLEA", 1
_START = struct.Struct("<4sHHI")
_DIGEST_BYTES = 32
_BEFORE_TEXT = _START.size + _DIGEST_BYTES
# Parsed JSON takes many times the size of its text.
_MOST_TEXT = 2**26
_MOST_AXES = 32
_DTYPE = re.compile(r"\|b1|[|<][iu][1248]|<f(2|4|8|16)|<c(8|16|32)|<U[1-9]\d{0,5}")
_AT_ONCE = 2**20


@dataclass(frozen=True)
class Kind:
    """Kind of an archive's content.

    Parameters
    ----------
    name : str
        Name of the kind.
    version : int
        Version of its facts and arrays; an archive of another version is refused.
    """

    name: str
    version: int = 1


@dataclass(frozen=True, eq=False)
class Archive:
    """Facts that JSON can hold, and named arrays.

    Parameters
    ----------
    facts : mapping
        Counters, settings, short lists.
    arrays : mapping of str to array
        Weights, samples and the like.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]

    def under(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the arrays whose names begin with ``prefix``, by the rest of the name."""
        return {
            name.removeprefix(prefix): array
            for name, array in self.arrays.items()
            if name.startswith(prefix)
        }


def write_archive(
    path: str | os.PathLike[str],
    kind: Kind,
    facts: Mapping[str, Any],
    arrays: Mapping[str, Any] | None = None,
    mode: int | None = OWNER_ONLY,
    *,
    durable: bool = True,
) -> Path:
    """Replace the file at ``path`` by an archive, by default readable by its owner only; see `write_atomically`.

    Raises
    ------
    ArchiveError
        If an array has an unsupported type, or the facts are too long.
    OSError
        If the disk refuses the write; the old file then stays.
    """
    return write_atomically(path, _parts(kind, facts, arrays or {}), mode, durable=durable)


def archive_bytes(kind: Kind, archive: Archive) -> bytes:
    """Return the bytes that `write_archive` writes."""
    return b"".join(_parts(kind, archive.facts, archive.arrays))


def read_archive(path: str | os.PathLike[str], kind: Kind, *, most: int | None = None) -> Archive:
    """Read a file of `write_archive`.

    Nothing is parsed before the digest fits, and no more memory is allocated than the length of the file.

    Parameters
    ----------
    path : path-like
        The file.
    kind : Kind
        The expected kind of content.
    most : int, optional
        Largest accepted size of the file in bytes.

    Raises
    ------
    ArchiveError
        If the file is damaged, too long, or of another kind.
    ArchiveVersionError
        If it is intact but of another version.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if most is not None and size > most:
            raise ArchiveError(f"it holds {size} bytes, at most {most} are expected")
        return _read(stream, size, kind)


def archive_of(data: bytes, kind: Kind) -> Archive:
    """Read the bytes of `archive_bytes`; raises like `read_archive`."""
    return _read(BytesIO(data), len(data), kind)


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like an archive; False if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _parts(
    kind: Kind, facts: Mapping[str, Any], arrays: Mapping[str, Any]
) -> list[bytes | memoryview]:
    import numpy as np

    # No copy is made, except on big-endian machines.
    kept = {name: _little_endian(np.asarray(array)) for name, array in arrays.items()}
    table = []
    for name, array in kept.items():
        if not _DTYPE.fullmatch(array.dtype.str):
            raise ArchiveError(
                f"array {name[:80]!r} has type {array.dtype}, which is not supported"
            )
        table.append([name, array.dtype.str, list(array.shape)])
    head = {"kind": kind.name, "version": kind.version, "facts": dict(facts), "arrays": table}
    text = json.dumps(head, separators=(",", ":")).encode()
    if len(text) > _MOST_TEXT:
        raise ArchiveError(
            f"facts take {len(text)} bytes, at most {_MOST_TEXT}: store them as arrays"
        )
    start = _START.pack(_MAGIC, _FORMAT, 0, len(text))
    numbers = [array.reshape(-1).view(np.uint8).data for array in kept.values()]
    digest = blake2b(start + text, digest_size=_DIGEST_BYTES)
    for part in numbers:
        digest.update(part)
    return [start, digest.digest(), text, *numbers]


def _read(stream: BinaryIO, size: int, kind: Kind) -> Archive:
    start = stream.read(_BEFORE_TEXT)
    head = _head(stream, start, size)
    _check_kind(head, kind)
    facts, table = head.get("facts"), head.get("arrays")
    if not isinstance(facts, dict) or not isinstance(table, list):
        raise ArchiveError("it has no facts or no table of arrays")
    shapes = dict(_row(row) for row in table)
    if len(shapes) != len(table):
        raise ArchiveError("two of its arrays have the same name")
    described = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    if described != size - stream.tell():
        raise ArchiveError(
            f"its arrays take {size - stream.tell()} bytes, its table says {described}"
        )
    return Archive(facts, {name: _array(stream, *each) for name, each in shapes.items()})


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _head(stream: BinaryIO, start: bytes, size: int) -> dict[str, Any]:
    """Check a file's digest and return its parsed text; the stream is then positioned after the text."""
    damaged = ArchiveError("it is truncated, damaged or no archive")
    if len(start) < _BEFORE_TEXT:
        raise damaged
    magic, version, zero, length = _START.unpack_from(start)
    digest = blake2b(start[: _START.size], digest_size=_DIGEST_BYTES)
    while some := stream.read(_AT_ONCE):
        digest.update(some)
    if magic != _MAGIC or digest.digest() != start[_START.size :]:
        raise damaged
    if (version, zero) != (_FORMAT, 0):
        raise ArchiveVersionError(f"it is an archive of version {version}, expected {_FORMAT}")
    if length > min(size - _BEFORE_TEXT, _MOST_TEXT):
        raise ArchiveError(f"its text is said to take {length} bytes of {size}")
    stream.seek(_BEFORE_TEXT)
    try:
        head = json.loads(stream.read(length))
    except (ValueError, RecursionError):
        raise ArchiveError("its text is not valid JSON") from None
    if not isinstance(head, dict):
        raise ArchiveError("its text is not a JSON object")
    return head


def _check_kind(head: dict[str, Any], kind: Kind) -> None:
    seen = head.get("kind")
    if seen != kind.name:
        raise ArchiveError(f"it holds {str(seen)[:80]!r}, expected {kind.name!r}")
    version = head.get("version")
    if type(version) is not int or version != kind.version:
        raise ArchiveVersionError(f"it has version {repr(version)[:40]}, expected {kind.version}")


def _row(row: Any) -> tuple[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return name, dtype and shape from a row of the table."""
    import numpy as np

    try:
        name, dtype, shape = row
        fits = isinstance(name, str) and _DTYPE.fullmatch(dtype) and len(shape) <= _MOST_AXES
        if not fits or any(type(side) is not int or not 0 <= side < 2**48 for side in shape):
            raise ValueError
        return name, (np.dtype(dtype), tuple(shape))
    except (TypeError, ValueError):
        raise ArchiveError(f"its table of arrays has an impossible row {repr(row)[:80]}") from None


def _array(stream: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    import numpy as np

    try:
        array = np.empty(shape, dtype)
    except ValueError:
        # An empty shape can still have an axis that is too long for numpy.
        raise ArchiveError(f"its table of arrays has an impossible shape {shape}") from None
    view = array.reshape(-1).view(np.uint8).data
    stream.readinto(view)  # type: ignore[attr-defined]
    return array.astype(dtype.newbyteorder("="), copy=False)
