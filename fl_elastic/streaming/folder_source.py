"""A source that reads files of samples from a folder, and moves each file away after it was read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np

from fl_elastic.errors import StreamError
from fl_elastic.streaming.intake import Unreadable
from fl_elastic.streaming.sources import POLL_SECONDS, SOURCES, SourceReading

_DONE = "done"


@SOURCES.register("dir")
def folder(where: str, after: Mapping[str, Any], follow: bool) -> Iterator[SourceReading]:
    """Yield the samples of ``.npz`` files (arrays ``x``, and perhaps ``y``) in the order of their names.

    A label is a whole number; NaN stands for none. If ``y`` is one number, the file holds one sample.

    A file that was read to its end is moved to the subfolder ``done``. Write a new file under another name, such as
    one that begins with a dot, and rename it, so that it is never read incomplete. A file that cannot be read is
    refused, and moved as well.
    """
    path = Path(where)
    if not path.is_dir():
        raise StreamError(f"there is no folder {path}")
    return _files(path, after, follow)


def _files(path: Path, after: Mapping[str, Any], follow: bool) -> Iterator[SourceReading]:
    begun = path / str(after.get("file", ""))
    # The file that was being read comes first, even if other files have come since.
    if after and begun.is_file() and _digest(begun) == after.get("digest"):
        yield from _file(begun, after.get("digest", ""), int(after.get("rows", 0)))
        _put_away(begun)
    while True:
        # A name with a leading dot marks a file that is still being written.
        waiting = sorted(file for file in path.glob("*.npz") if not file.name.startswith("."))
        for file in waiting:
            yield from _file(file, _digest(file), 0)
            _put_away(file)
        if not waiting:
            if not follow:
                return
            time.sleep(POLL_SECONDS)
            yield SourceReading()


def _file(file: Path, digest: str, skip: int) -> Iterator[SourceReading]:
    def position(rows: int) -> dict[str, Any]:
        return {"file": file.name, "digest": digest, "rows": rows}

    try:
        if not is_zipfile(file):
            raise ValueError("no .npz file")
        with np.load(file, allow_pickle=False) as stored:
            if "x" not in stored.files:
                raise ValueError(f"no array x, only {', '.join(stored.files)}")
            arrays = {name: stored[name] for name in ("x", "y") if name in stored.files}
        if np.ndim(arrays.get("y", [])) == 0:
            # A label that is one number means that the file holds one sample.
            arrays = {name: array[np.newaxis] for name, array in arrays.items()}
        x = arrays["x"]
        y = arrays.get("y", [None] * len(x))
        if len(x) != len(y):
            raise ValueError(f"{len(x)} samples, {len(y)} labels")
    except Exception as error:
        # A file may be damaged in any way, and its reader may raise anything: only this file is lost.
        if not skip:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            yield SourceReading(
                x=Unreadable(f"{file.name}: {said}"), y=0, ends=True, position=position(1)
            )
        return
    for number, (sample, label) in enumerate(zip(x, y, strict=True), start=1):
        if number > skip:
            given = None if _is_missing(label) else label
            yield SourceReading(sample, given, ends=number == len(x), position=position(number))


def _is_missing(label: Any) -> bool:
    """Return whether a label is missing, which an array of labels can only express by NaN."""
    return isinstance(label, np.floating) and bool(np.isnan(label))


def _digest(file: Path) -> str:
    """Return a digest that distinguishes files of the same name; empty if the file cannot be read."""
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        return ""


def _put_away(file: Path) -> None:
    done = file.parent / _DONE
    try:
        done.mkdir(exist_ok=True)
        file.rename(done / file.name)
    except FileNotFoundError:
        # Someone else has moved it already.
        return
    except OSError as error:
        raise StreamError(
            f"{file} was read and cannot be moved to {done}: {error.strerror or error}; it would be read again"
        ) from None
