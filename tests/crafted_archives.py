"""Archives that no writer makes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEXT = struct.Struct("<4sHHI").size + 32
"""Where the text begins."""


def sealed(text: bytes, numbers: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    """A file whose digest fits, whatever its text says."""
    start = struct.pack("<4sHHI", b"FLEA", version, 0, len(text) if length is None else length)
    return start + blake2b(start + text + numbers, digest_size=32).digest() + text + numbers


def table_of(arrays: Mapping[str, NDArray[Any]]) -> list[list[Any]]:
    """What a writer says of the arrays."""
    return [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]


def crafted(kind: str, version: Any, facts: bytes, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """An archive with any bytes in the place of its facts."""
    text = b'{"kind":%s,"version":%s,"facts":%s,"arrays":%s}' % (
        json.dumps(kind).encode(), json.dumps(version).encode(), facts,
        json.dumps(table_of(arrays)).encode(),
    )  # fmt: skip
    return sealed(text, b"".join(np.asarray(array).tobytes() for array in arrays.values()))


def text_of(path: Path) -> dict[str, Any]:
    """The text of an archive: kind, version, facts, table."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<8xI", data)
    found: dict[str, Any] = json.loads(data[TEXT : TEXT + length])
    return found
