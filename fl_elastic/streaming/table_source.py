"""A table as a source: rows of a CSV file, which may grow, and be rotated away."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fl_elastic.errors import StreamError
from fl_elastic.streaming.reading import POLL_SECONDS, Reading, register_source
from fl_elastic.streaming.table_file import Line, TableFile, fields_of, named

__all__ = ["table"]

_LOG = logging.getLogger("fl_elastic")


@register_source("csv")
def table(where: str, after: Mapping[str, Any], follow: bool) -> Iterator[Reading]:
    """Yield the rows of a CSV file with a header.

    The column ``label`` (or else the last one) is the label, empty for none; ``time`` the time, if there is such a
    column; all others are the sample. What cannot be read as numbers is handed on for the learner to refuse.

    A table that is followed may be renamed and a new one begun in its place: the old one is read to its end first.
    One that is cut off, or has other bytes before the place, is refused: nobody knows which of its rows are new.
    """
    path = Path(where)
    if not path.is_file():
        raise StreamError(f"there is no table {path}")
    try:
        return _rows(_first(path, after, follow), path, follow)
    except OSError as error:
        raise StreamError(f"cannot read the table {path}: {error.strerror or error}") from None


def _first(path: Path, after: Mapping[str, Any], follow: bool) -> TableFile:
    """Return the file to begin with, at its place."""
    file = TableFile(path)
    if not after or file.go_to(after):
        return file
    rows, inode = after.get("rows"), after.get("inode")
    file.close()
    if not follow or file.inode == inode:
        raise StreamError(
            f"the table {path} is not as it was when {rows} rows of it were learned: it is shorter now, or was "
            "changed before that place. Put it back, or learn it from its beginning with another --state-dir"
        )
    # Renamed while nobody read: what it had more is read first.
    for other in sorted(path.parent.glob(f"{path.name}*")):
        if other.stat().st_ino == inode and (old := TableFile(other)).go_to(after):
            return old
    _LOG.warning(
        "%s is another table than that of which %s rows were learned, which is gone: it is read from its beginning",
        path, rows,
    )  # fmt: skip
    return TableFile(path)


def _rows(file: TableFile, path: Path, follow: bool) -> Iterator[Reading]:
    while True:
        with file:
            yield from _rows_of(file, path, follow)
            if not follow:
                return
            at = file.place(file.end)
        while not path.is_file():
            # Between the renaming of the old one and the first row of the new one.
            yield from _pause()
        file = TableFile(path)
        # One that was written anew with all its rows goes on where it was.
        if not file.go_to(at):
            _LOG.warning("%s is a new table: it is read from its beginning", path)
            file.close()
            file = TableFile(path)


def _rows_of(file: TableFile, path: Path, follow: bool) -> Iterator[Reading]:
    """Yield the rows of one file, to its end or until another one is in its place."""
    while True:
        # Asked before reading: what was written before the renaming is read in any case.
        replaced = follow and file.is_replaced(path)
        for line in file.lines(final=replaced or not follow):
            if file.header is None:
                file.header = named(line.text)
            elif line.text.strip() or line.is_too_long:
                file.rows += 1
                yield _row(line, file.header, file.place(line.end))
        if replaced or not follow:
            return
        yield from _pause()


def _pause() -> Iterator[Reading]:
    time.sleep(POLL_SECONDS)
    yield Reading()


def _row(line: Line, names: list[str], place: Mapping[str, Any]) -> Reading:
    label = names.index("label") if "label" in names else len(names) - 1
    when = names.index("time") if "time" in names else None
    fields = [] if line.is_too_long else fields_of(line.text)
    if len(fields) != len(names):
        return Reading(x=f"{len(fields)} fields", y=0, place=place)
    numbers = [_number(field) for column, field in enumerate(fields) if column not in (label, when)]
    y = fields[label].strip()
    with np.errstate(over="ignore"):
        x = np.array(numbers, np.float32)
    t = None if when is None else _number(fields[when])
    return Reading(x=x, y=_number(y) if y else None, t=t, place=place)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
