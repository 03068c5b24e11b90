"""``fl-elastic fleet doctor``: what is wrong with a node or a server, and how to mend it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from fl_elastic.fleet.doctor import Finding

__all__ = ["doctor"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}


def doctor(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR|NODE_DIR]", help="Folder of a fleet or of a node."),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Train a tiny model once: does torch work here?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and the folder's keys, certificates, server and clock; exit 1 if anything fails."""
    from fl_elastic.fleet.doctor import check_up

    findings = check_up(folder)
    if self_test:
        from fl_elastic.fleet.doctor.self_test import self_test as train_once

        findings.append(train_once())
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(each) for each in findings]}))
    else:
        Console().print(_table(findings))
    if any(each.status == "fail" for each in findings):
        raise typer.Exit(1)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("check", "", "seen", "what to do")
    for each in findings:
        colour = _COLOURS[each.status]
        table.add_row(
            each.name, f"[{colour}]{each.status}[/]", escape(each.seen), escape(each.remedy)
        )
    return table
