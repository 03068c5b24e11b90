"""Forms in which earlier releases kept state: read once more, and replaced by an archive when it is next kept."""

from __future__ import annotations

import json
import math
import os
import zipfile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import ArchiveError, ArchiveVersionError
from fl_elastic.registry import first_line
from fl_elastic.storage import Archive, Kind, OldForm

__all__ = ["json_file", "npz_file", "residuals_file"]

_MOST_TEXT = 2**26


def json_file(stream: BinaryIO, kind: Kind) -> Archive:
    """Read facts that were one JSON object; raises ArchiveError for anything else.

    Examples
    --------
    >>> import io
    >>> json_file(io.BytesIO(b'{"rounds": 3}'), Kind("mark")).facts
    {'rounds': 3}
    """
    return Archive(_facts(stream.read(_MOST_TEXT + 1), kind), {})


def npz_file(facts: str) -> OldForm:
    """Return what reads an ``.npz`` file; of its arrays the one of this name holds facts, as the bytes of JSON."""

    def read(stream: BinaryIO, kind: Kind) -> Archive:
        arrays = _arrays(stream)
        text = arrays.pop(facts, None)
        if text is None:
            raise ArchiveError(f"it has no {facts}")
        return Archive(_facts(text.tobytes(), kind), arrays)

    return read


def residuals_file(stream: BinaryIO, kind: Kind) -> Archive:
    """Read an ``.npz`` file of numbered arrays beside a list of their names."""
    arrays = _arrays(stream)
    try:
        names = [str(name) for name in arrays["names"].reshape(-1)]
        return Archive({}, {name: arrays[f"arr_{index}"] for index, name in enumerate(names)})
    except KeyError as error:
        raise ArchiveError(f"it has no {error}") from None


def _facts(text: bytes, kind: Kind) -> dict[str, Any]:
    try:
        facts = json.loads(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError):
        raise ArchiveError("it is neither an archive nor valid JSON") from None
    if not isinstance(facts, dict):
        raise ArchiveError("it is neither an archive nor a JSON object")
    name, version = facts.pop("format", kind.name), facts.pop("version", 1)
    # The result of a round had a number there.
    if name not in (kind.name, 1):
        raise ArchiveError(f"it holds {str(name)[:80]!r}, expected {kind.name!r}")
    if type(version) is not int or version != kind.version:
        raise ArchiveVersionError(f"it has version {repr(version)[:40]}, expected {kind.version}")
    return facts


def _arrays(stream: BinaryIO) -> dict[str, NDArray[Any]]:
    """Read the arrays of an uncompressed zip archive, which take no more memory than the file is long."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            size, most = sum(each.file_size for each in members), os.fstat(stream.fileno()).st_size
            if size > most:
                raise ArchiveError(f"it unpacks to {size} bytes, at most {most} are expected")
            return {each.filename.removesuffix(".npy"): _array(archive, each) for each in members}
    except ArchiveError:
        raise
    # A truncated zip archive raises its own family of errors.
    except Exception as error:
        raise ArchiveError(f"it is no readable archive ({first_line(error)[:200]})") from None


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ArchiveError(f"array {member.filename[:80]!r} has format {version}")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
        numbers = stream.read()
    if dtype.kind not in "biufcU" or math.prod(shape) * dtype.itemsize != len(numbers):
        raise ArchiveError(f"array {member.filename[:80]!r} is {dtype} of shape {shape}")
    return np.frombuffer(numbers, dtype).reshape(shape, order="F" if by_columns else "C").copy()
