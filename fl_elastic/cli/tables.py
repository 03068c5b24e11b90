"""Tables for a terminal or a pipe; numbers are never cut off, even on a narrow terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Column, Table

if TYPE_CHECKING:
    from fl_elastic.fleet.change import Change
    from fl_elastic.fleet.register import Registration


# Least width of a column whose long names may be broken anywhere.
_LEAST_FOLDED = 10
_UNBOUNDED = 10_000


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table whose columns are wide enough for each of their words.

    A table may be wider than the terminal: a line that wraps is readable, a number that is cut off is not. Columns
    that fold may break their words.

    Parameters
    ----------
    table : Table
        The table; its column widths are changed.
    console : Console, optional
        Where to print; by default to the standard output.
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
    # Width is first used to print names in one line, and only then headings of several words.
    folded = [each for each in table.columns if each.overflow == "fold"]
    for columns in (folded, table.columns):
        while room > 0 and (
            narrow := [each for each in columns if (each.width or 0) < needs[id(each)].maximum]
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


def say(text: str) -> None:
    """Print a line to standard error, apart from the result."""
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


def show_changes(changes: Sequence[Change], as_json: bool) -> None:
    """Print the changes of a folder; unchanged files are only counted."""
    if as_json:
        rows = [{"what": c.what, "path": str(c.path), "why": c.why} for c in changes]
        typer.echo(json.dumps({"changes": rows}))
        return
    for change in changes:
        if change.what != "kept" or change.why:
            why = f" ({change.why})" if change.why else ""
            typer.echo(f"{change.what:<8} {change.path}{why}")
    kept = sum(change.what == "kept" for change in changes)
    if kept:
        typer.echo(f"{kept} kept as they are")


def show_registrations(done: Sequence[Registration], as_json: bool) -> None:
    """Print the results of registering nodes at the server."""
    if as_json:
        typer.echo(json.dumps({"nodes": [asdict(registration) for registration in done]}))
        return
    for registration in done:
        about = " ".join(
            filter(
                None, (registration.node_id, f"({registration.why})" if registration.why else "")
            )
        )
        typer.echo(f"{registration.name}: {registration.what} {about}".rstrip())
