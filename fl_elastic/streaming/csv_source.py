"""A source that reads the rows of a CSV file, which may grow and be rotated."""

from __future__ import annotations

import csv
import logging
import os
import re
import time
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import StreamDataError, StreamError
from fl_elastic.streaming.intake import Unreadable
from fl_elastic.streaming.sources import (
    LONGEST_LINE,
    POLL_SECONDS,
    SOURCES,
    TOO_LONG,
    SourceReading,
)

_LOG = logging.getLogger("fl_elastic")
_PART = 2**16
# Number of bytes before a position whose checksum identifies it.
_TAIL = 256
# Most characters of a field, and of a header, in a message.
_SHOWN, _HEADER_SHOWN = 24, 60
_LINE_END = re.compile(rb"\r\n?|\n")


@SOURCES.register("csv")
def table(where: str, after: Mapping[str, Any], follow: bool) -> Iterator[SourceReading]:
    """Yield the rows of a CSV file with a header of names, or of the columns' numbers from 0.

    A column ``time`` is skipped. Of the others the column ``label`` (or else the last one) is the label: an
    integer, or empty or NaN for none; the rest form the sample. A row that cannot be read is yielded with the
    reason, and the learner refuses it.

    A followed table may be renamed and a new one with the same columns begun in its place: the old one is read to
    its end first. A table that was truncated, or changed before the position, is refused, because its new rows
    cannot be told from the old ones.
    """
    path = Path(where)
    if not path.is_file():
        raise StreamError(f"there is no table {path}")
    try:
        return _rows(_first(path, after, follow), path, follow, after.get("columns"))
    except OSError as error:
        raise StreamError(f"cannot read the table {path}: {error.strerror or error}") from None


def _first(path: Path, after: Mapping[str, Any], follow: bool) -> TableFile:
    """Return the file to begin with, at its position."""
    file = TableFile(path)
    if not after or file.go_to(after):
        return file
    rows, inode = after.get("rows"), after.get("inode")
    file.close()
    if not follow or file.inode == inode:
        raise StreamDataError(
            f"the table {path} is not as it was when {rows} rows of it were learned: it is shorter now, or was "
            "changed before that position. Put it back, or learn it from its beginning with another --state-dir"
        )
    # The table was renamed while nothing read it: read the rest of the old one first.
    for other in sorted(path.parent.glob(f"{path.name}*")):
        if other.stat().st_ino == inode and (old := TableFile(other)).go_to(after):
            return old
    _LOG.warning(
        "%s is not the table from which %s rows were learned; that one is gone: it is read from its beginning",
        path, rows,
    )  # fmt: skip
    return TableFile(path)


def _rows(
    file: TableFile, path: Path, follow: bool, columns: int | None
) -> Iterator[SourceReading]:
    while True:
        with file:
            columns = yield from _rows_of(file, path, follow, columns)
            if not follow:
                return
            at = file.position(file.end)
        while not path.is_file():
            # The old table was renamed, and the new one does not exist yet.
            yield from _pause()
        file = TableFile(path)
        # Reading of a file that was rewritten with the same rows continues at the same position.
        if not file.go_to(at):
            _LOG.warning("%s is a new table: it is read from its beginning", path)
            file.close()
            file = TableFile(path)


def _rows_of(
    file: TableFile, path: Path, follow: bool, columns: int | None
) -> Generator[SourceReading, None, int | None]:
    """Yield the rows of one file, until its end or until another file has taken its place; return its columns.

    Raises
    ------
    StreamDataError
        If the columns differ from ``columns``, those of the earlier rows.
    """
    if file.header is not None:
        columns = _columns_as_before(file.header, columns, path)
    while True:
        # Checked before reading, so that rows written before the renaming are read in any case.
        replaced = follow and file.is_replaced(path)
        for line in file.lines(final=replaced or not follow):
            if file.header is None:
                file.header = _with_samples(named(line.text), path)
                columns = _columns_as_before(file.header, columns, path)
            elif line.text.strip() or line.is_too_long:
                file.rows += 1
                position = {**file.position(line.end), "columns": columns}
                yield _row(line, file.header, position)
        if replaced or not follow:
            return columns
        yield from _pause()


def _with_samples(names: list[str], path: Path) -> list[str]:
    """Return the names of a header's columns.

    Raises
    ------
    StreamDataError
        If no column is left for the sample, two columns are the label or the time, or the line is a row of numbers
        or no UTF-8 text.
    """
    shown = repr(", ".join(names)[:_HEADER_SHOWN])
    if all("\0" in name for name in names):
        raise StreamDataError(
            f"the table {path} is no UTF-8 text: it holds zero bytes, as UTF-16 does, which spreadsheets call "
            "Unicode text. Save it as CSV in UTF-8"
        )
    if not any(name != "time" for name in names) or not _places(names)[1]:
        raise StreamDataError(
            f"the table {path} has no column for a sample, only {shown}: put a header with commas between the "
            "names into its first line"
        )
    for name in ("label", "time"):
        if names.count(name) > 1:
            raise StreamDataError(
                f"the table {path} has {names.count(name)} columns {name!r}, but only one can be the {name}: "
                "rename or remove the others"
            )
    # Numbers may be names if they number the columns.
    numbered = names == [str(index) for index in range(len(names))]
    if not numbered and all(isinstance(_number(name), float) for name in names):
        raise StreamDataError(
            f"the table {path} begins with the numbers {shown}, which would be lost as the names of columns: put a "
            "header into its first line"
        )
    return names


def _columns_as_before(names: list[str], columns: int | None, path: Path) -> int:
    """Return a checksum of a table's columns; raise StreamDataError if earlier rows had other columns."""
    found = columns_of(names)
    if columns is not None and found != columns:
        shown = repr(", ".join(names)[:_HEADER_SHOWN])
        raise StreamDataError(
            f"the table {path} begins with {shown}, other columns than those of the rows learned before, or in "
            "another order: give it the same header, or learn it with another --state-dir"
        )
    return found


def _pause() -> Iterator[SourceReading]:
    time.sleep(POLL_SECONDS)
    yield SourceReading()


def _row(line: Line, names: list[str], position: Mapping[str, Any]) -> SourceReading:
    label, places = _places(names)
    fields = Unreadable(TOO_LONG) if line.is_too_long else fields_of(line.text)
    if not isinstance(fields, Unreadable) and len(fields) != len(names):
        fields = Unreadable(f"{len(fields)} fields instead of {len(names)}")
    if isinstance(fields, Unreadable):
        return SourceReading(x=fields, y=0, position=position)
    y = _number(fields[label].strip())
    return SourceReading(
        x=_sample([(names[i], fields[i]) for i in places]),
        # A program that writes only numbers writes NaN for a missing label.
        y=None if y == "" or y != y else y,
        position=position,
    )


def _places(names: list[str]) -> tuple[int, list[int]]:
    """Return the place of the label's column, and those of the sample's."""
    given = [place for place, name in enumerate(names) if name != "time"]
    label = names.index("label") if "label" in names else given[-1]
    return label, [place for place in given if place != label]


def columns_of(names: list[str]) -> int:
    """Return a checksum of the columns of a sample and its label; ignored columns do not affect it.

    >>> one, other = columns_of(["a", "b", "label"]), columns_of(["b", "a", "label"])
    >>> one == columns_of(["time", "label", "a", "b"]), one == other
    (True, False)
    """
    label, places = _places(names)
    return zlib.crc32("\n".join([names[label], *(names[i] for i in places)]).encode())


def _sample(fields: Sequence[tuple[str, str]]) -> NDArray[np.float32] | Unreadable:
    numbers = []
    for name, field in fields:
        number = _number(field)
        if isinstance(number, str):
            return Unreadable(
                f"{field.strip()[:_SHOWN]!r} in column {name[:_SHOWN]!r} is not a number"
            )
        numbers.append(number)
    with np.errstate(over="ignore"):
        return np.array(numbers, np.float32)


def _number(text: str) -> float | str:
    """Return text as a number; unchanged if it is not one, so that the refusal can quote it."""
    try:
        # Only Python accepts an underscore between digits.
        return float(text) if "_" not in text else text
    except ValueError:
        return text


@dataclass(frozen=True)
class Line:
    """A line without its line end, and the offset after it; the text is empty if the line was too long."""

    text: str
    end: int
    is_too_long: bool = False


def fields_of(text: str) -> list[str] | Unreadable:
    """Return the fields of a line, or the reason why it cannot be parsed."""
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        return Unreadable(f"no row of a table: {error}")


class TableFile:
    """An open table.

    Parameters
    ----------
    path : Path
        Its present path; it may be renamed while it is read.

    Attributes
    ----------
    header : list of str or None
        Lower-case names of its columns; None until the header was read.
    rows : int
        Number of rows read so far.
    inode : int
        Its inode number.

    Raises
    ------
    OSError
        If it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.inode = os.fstat(self._file).st_ino
        self.header: list[str] | None = None
        self.rows = 0
        # Bytes read but not yielded yet, their offset, and the number already searched for a line end.
        self._buffer, self._start, self._searched = b"", 0, 0
        # Line end of the first line: some programs write a carriage return alone.
        self._newline: bytes | None = None
        self._overlong = False
        self._seen_end: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def position(self, end: int) -> dict[str, Any]:
        """Return the position at an offset."""
        return {"offset": end, "rows": self.rows, "tail": self._tail(end), "inode": self.inode}

    def go_to(self, position: Mapping[str, Any]) -> bool:
        """Continue from a position; return whether the bytes before it are unchanged."""
        first = next(self.lines(final=True), None)
        self.header = None if first is None else named(first.text)
        rows, end = int(position["rows"]), int(position["offset"])
        if end > os.fstat(self._file).st_size or self._tail(end) != position.get("tail"):
            return False
        self._buffer, self._start, self._searched, self.rows = b"", end, 0, rows
        return True

    def lines(self, *, final: bool) -> Iterator[Line]:
        """Yield the available lines; an unfinished last one only if it is ``final``.

        Raises
        ------
        StreamError
            If the file was truncated, or changed before the offset up to which it was read.
        """
        while (line := self._line(final)) is not None:
            yield line

    @property
    def end(self) -> int:
        """The offset after the last line that was yielded."""
        return self._start

    def is_replaced(self, path: Path) -> bool:
        """Return whether another file is at the path now, or none."""
        try:
            return os.stat(path).st_ino != self.inode
        except OSError:
            return True

    def _line(self, final: bool) -> Line | None:
        while (end := self._line_end()) < 0:
            self._searched = len(self._buffer)
            if self._searched > LONGEST_LINE:
                self._overlong = True
                self._start += self._searched
                self._buffer, self._searched = b"", 0
            if not self._more():
                if not (final and (self._buffer or self._overlong)):
                    return None
                end = len(self._buffer) - 1
                break
        text, self._buffer, self._searched = self._buffer[: end + 1], self._buffer[end + 1 :], 0
        self._start += len(text)
        overlong, self._overlong = self._overlong or len(text) > LONGEST_LINE, False
        said = "" if overlong else text.decode("utf-8", "replace").rstrip("\r\n")
        return Line(said, self._start, overlong)

    def _line_end(self) -> int:
        """Return where the next line ends in the buffer; -1 if its end has not been read."""
        start = max(self._searched - 1, 0)
        if self._newline is None:
            found = _LINE_END.search(self._buffer, start)
            # The next byte tells whether a carriage return stands alone.
            if found is None or (found[0] == b"\r" and found.end() == len(self._buffer)):
                return -1
            self._newline = b"\r" if found[0] == b"\r" else b"\n"
        return self._buffer.find(self._newline, start)

    def _more(self) -> bool:
        """Read more bytes; return whether there were any."""
        at = self._start + len(self._buffer)
        data = os.pread(self._file, _PART, at)
        if not data:
            if os.fstat(self._file).st_size < at:
                self._refuse(at)
            self._seen_end = self._tail(at)
            return False
        # Since the last read the file may have been truncated and have grown again.
        if self._seen_end is not None and self._tail(at) != self._seen_end:
            self._refuse(at)
        self._seen_end = None
        self._buffer += data
        return True

    def _refuse(self, at: int) -> None:
        raise StreamDataError(
            f"the table {self._path} was cut off or changed before byte {at}, up to which it was read "
            f"({self.rows} rows): new rows cannot be told from old ones. Append to it, or rename it and begin a "
            "new one in its place"
        )

    def _tail(self, end: int) -> int:
        start = max(end - _TAIL, 0)
        return zlib.crc32(os.pread(self._file, end - start, start))


def named(text: str) -> list[str]:
    """Return the lower-case names of a header's columns."""
    fields = fields_of(text.removeprefix("\ufeff"))
    names = [] if isinstance(fields, Unreadable) else [name.strip().lower() for name in fields]
    return names or [""]
