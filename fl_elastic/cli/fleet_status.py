"""``fl-elastic fleet status``: the status of each node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fl_elastic.cli.tables import print_table
from fl_elastic.errors import FleetError

if TYPE_CHECKING:
    from fl_elastic.fleet.status import NodeRound, NodeStatus


_GIB = 2**30


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the fleet.")],
    rounds: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Journal of the run; by default server/results/rounds.jsonl."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show for every node whether it is online, and its report from its last round."""
    from fl_elastic.fleet.flower_cli import ServerUnreachable, flower_at
    from fl_elastic.fleet.inventory import load_inventory
    from fl_elastic.fleet.layout import FleetFolder
    from fl_elastic.fleet.status import fleet_status, last_rounds
    from fl_elastic.monitoring.journal import Journal

    place = FleetFolder(folder)
    inventory = load_inventory(place.inventory)
    problem: FleetError | None = None
    states = None
    try:
        states = flower_at(place, inventory.server).nodes()
    except ServerUnreachable as error:
        # Show what is known without the server, then report the error.
        problem = error
    said = last_rounds(Journal(place.rounds if rounds is None else rounds).entries())
    found = fleet_status(inventory, states, said)
    if as_json:
        typer.echo(
            json.dumps({"server": problem is None, "nodes": [asdict(each) for each in found]})
        )
    else:
        print_table(_table(found))
    if problem is not None:
        raise problem


def _table(found: Sequence[NodeStatus]) -> Table:
    # With padding at the edge, rich makes the first column too narrow and cuts names off.
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, show_edge=False, pad_edge=False
    )
    table.add_column("node", overflow="fold")
    for name in ("state", "since, UTC", "round", "step", "temp.", "coverage", "disk free"):
        table.add_column(name)
    colours = {"online": "green", "offline": "red", "revoked": "dim", "unknown": "yellow"}
    for each in found:
        colour = colours.get(each.state, "yellow")
        table.add_row(
            each.name, f"[{colour}]{each.state}[/]", _moment(each.last_seen), *_round(each.last)
        )
    return table


def _round(last: NodeRound | None) -> tuple[str, str, str, str, str]:
    if last is None:
        return ("", "", "", "", "")
    return (
        ", ".join(filter(None, (str(last.round), _clock(last.time)))),
        "" if last.step_seconds is None else f"{last.step_seconds * 1000:.0f} ms",
        "" if last.temperature is None else f"{last.temperature:.0f} °C",
        "" if last.coverage is None else f"{last.coverage:.0%}",
        "" if last.disk_free_bytes is None else f"{last.disk_free_bytes / _GIB:.0f} GiB",
    )


def _clock(text: str | None) -> str:
    """Return seconds since 1970 as a date and time to read; any other text unchanged."""
    try:
        return _short(datetime.fromtimestamp(float(text or ""), UTC))
    except (ValueError, OverflowError, OSError):
        return text or ""


def _moment(text: str | None) -> str:
    """Return a date and time to the minute; any other text unchanged."""
    try:
        return _short(datetime.fromisoformat(text or "").astimezone(UTC))
    except (ValueError, OverflowError):
        return text or ""


def _short(moment: datetime) -> str:
    return f"{moment:%m-%d %H:%M}"
