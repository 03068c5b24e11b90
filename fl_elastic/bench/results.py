"""A result table on disk that a benchmark fills cell by cell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fl_elastic.simulation.summary import environment
from fl_elastic.storage import write_atomically

__all__ = ["Results"]

# A list of nothing but numbers; a string cannot hold the line break.
_NUMBERS = re.compile(r'\[\n\s*([^\[\]{}"]*?)\n\s*\]')


class Results:
    """Rows of a benchmark by name, stored after each one, so that an interrupted run goes on.

    Parameters
    ----------
    path : Path
        The JSON file.
    fresh : bool
        Whether rows of an earlier run are measured again.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if not fresh and path.exists():
            try:
                self.rows = dict(json.loads(path.read_text())["rows"])
            except (ValueError, KeyError, TypeError):
                self.rows = {}

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Enter one row and write the table with machine, versions and date."""
        self.rows[name] = row
        document = {"environment": environment(), "rows": self.rows}
        text = _NUMBERS.sub(_in_one_line, json.dumps(document, indent=1))
        write_atomically(self.path, f"{text}\n".encode())


def _in_one_line(numbers: re.Match[str]) -> str:
    """Return a list of numbers in one line: a curve has hundreds of them."""
    return f"[{', '.join(part.strip() for part in numbers[1].split(','))}]"
