"""Tables for a terminal or a pipe; no figure is cut off, however narrow the terminal is."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Column, Table

__all__ = ["print_table"]

# Of a column whose long names may be broken anywhere.
_LEAST_FOLDED = 10
_UNBOUNDED = 10_000


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table whose columns are wide enough for each of their words.

    Where the terminal is not, the table is wider than that: a line that wraps can be read, and a figure that is cut
    off cannot. Columns that fold may break their words.

    Parameters
    ----------
    table : Table
        The widths of its columns are set.
    console : Console, optional
        Where to; the standard output if left out.
    """
    console = console or Console()
    wide = console.options.update(width=_UNBOUNDED, max_width=_UNBOUNDED)
    needs = {}
    for column in table.columns:
        needs[id(column)] = found = measure_renderables(
            console, wide, [column.header, *column.cells]
        )
        column.width = _least(column, found)
    least = Measurement.get(console, wide, table).maximum
    room = console.width - least
    while room > 0 and (
        narrow := [each for each in table.columns if (each.width or 0) < needs[id(each)].maximum]
    ):
        for column in narrow[:room]:
            column.width = (column.width or 0) + 1
        room -= len(narrow[:room])
    before, console.width = console.width, max(console.width, least)
    console.print(table)
    console.width = before


def _least(column: Column, found: Measurement) -> int:
    if column.overflow == "fold":
        return min(found.minimum, _LEAST_FOLDED)
    return found.maximum if column.no_wrap else found.minimum
