"""A result table on disk that a benchmark fills cell by cell."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_elastic.environment import environment
from fl_elastic.storage import write_atomically

__all__ = ["Results"]

# A list of nothing but numbers; a string cannot hold the line break.
_NUMBERS = re.compile(r'\[\n\s*([^\[\]{}"]*?)\n\s*\]')


class Results:
    """Rows of a benchmark by name, stored after each one, so that an interrupted run goes on.

    Several processes may fill one table: each takes over what others have added when it adds a row.

    Parameters
    ----------
    path : Path
        The JSON file.
    fresh : bool
        Whether rows of an earlier run are measured again.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {} if fresh else self._stored()
        self._fresh = fresh

    def measured_with(self) -> dict[str, Any]:
        """Return machine, versions and date of the table on disk; empty where there is none."""
        return self._part("environment")

    def catch_up(self) -> None:
        """Take over rows that other processes have added; own rows stay as they are."""
        if not self._fresh:
            self.rows = self._stored() | self.rows

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Enter one row and write the table with machine, versions and date."""
        with self._alone():
            self.catch_up()
            self._fresh = False
            self.rows[name] = row
            document = {"environment": environment(), "rows": self.rows}
            text = _NUMBERS.sub(_in_one_line, json.dumps(document, indent=1))
            write_atomically(self.path, f"{text}\n".encode())

    def _stored(self) -> dict[str, dict[str, Any]]:
        return self._part("rows")

    def _part(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self.path.read_text())[name])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from adding a row meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Of the folder, for the table itself is replaced with each row.
        handle = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _in_one_line(numbers: re.Match[str]) -> str:
    """Return a list of numbers in one line: a curve has hundreds of them."""
    return f"[{', '.join(part.strip() for part in numbers[1].split(','))}]"
