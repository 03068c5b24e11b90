"""``fl-elastic bench``: measurements behind the claims."""

from __future__ import annotations

import typer

__all__ = ["bench"]

bench = typer.Typer(help="Measure what the README claims.", no_args_is_help=True)


@bench.callback()
def describe() -> None:
    """Measure what the README claims."""
