"""Output of the fleet commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from fl_elastic.fleet.change import Change
    from fl_elastic.fleet.register import Registration


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
        typer.echo(json.dumps({"nodes": [asdict(each) for each in done]}))
        return
    for each in done:
        about = " ".join(filter(None, (each.node_id, f"({each.why})" if each.why else "")))
        typer.echo(f"{each.name}: {each.what} {about}".rstrip())
