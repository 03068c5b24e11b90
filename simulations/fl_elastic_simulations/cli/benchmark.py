"""How a function that measures becomes a command of ``fl-elastic bench``: options, a file of results, a table."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from fl_elastic.cli.tables import print_table
from fl_elastic.errors import ScenarioError

if TYPE_CHECKING:
    from fl_elastic_simulations.benchmarks.results import Results

__all__ = [
    "FOLDER",
    "DataRoot",
    "Fresh",
    "Json",
    "Method",
    "Output",
    "Page",
    "Seed",
    "Shown",
    "Task",
    "Workers",
    "bench",
    "benchmark",
    "tell",
    "write_page",
]

bench = typer.Typer(help="Measure what docs/measured.md claims.", no_args_is_help=True)

FOLDER = Path("simulations/results")
Output = Annotated[Path | None, typer.Option(help="File of the table (JSON).")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what is already there.")]
DataRoot = Annotated[Path | None, typer.Option(help="Folder that holds the datasets.")]
Workers = Annotated[int, typer.Option(min=1, help="Runs at a time.")]
Task = Annotated[list[str] | None, typer.Option(help="Run this task only (repeatable).")]
Seed = Annotated[list[int] | None, typer.Option(min=0, help="Run this seed only (repeatable).")]
Method = Annotated[list[str] | None, typer.Option(help="Run this method only (repeatable).")]
Page = Annotated[
    bool, typer.Option("--page", help="Write the page of what is there; measure nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the table as JSON.")]

Shown = Callable[[dict[str, dict[str, Any]]], "str | list[Table]"]
"""What a benchmark shows of its rows, where that is not the table of all of them."""


def benchmark(
    name: str | None = None, *, prefix: str = "", file: str | None = None
) -> Callable[[Callable[..., Shown | None]], object]:
    """Return a decorator that makes a command of a function that measures into the results it is given.

    The command has the options of every benchmark, then those of the function.

    Parameters
    ----------
    name : str, optional
        Of the command and of its file of results, where it is not the function's; with ``--quick`` the file is
        another one.
    file : str, optional
        Its file of results, where that has another name.
    prefix : str
        What the names of the rows begin with that are shown.
    """

    def register(measure: Callable[..., Shown | None]) -> object:
        called = name or measure.__name__

        def command(
            output: Output = None, fresh: Fresh = False, as_json: Json = False, **options: Any
        ) -> None:
            from fl_elastic_simulations.benchmarks.results import Results

            kept = f"{file or called}{'-quick' if options.get('quick') else ''}.json"
            results = Results(output or FOLDER / kept, fresh=fresh)
            shown = measure(results, **options)
            if as_json:
                typer.echo(json.dumps(results.rows))
            elif shown is None:
                _show(results, prefix)
            elif isinstance(found := shown(results.rows), str):
                typer.echo(found)
            else:
                for table in found:
                    print_table(table)

        own = list(inspect.signature(measure).parameters.values())[1:]
        common = list(inspect.signature(command).parameters.values())[:-1]
        hints = get_type_hints(command, include_extras=True)
        hints |= get_type_hints(measure, localns={"Results": Any}, include_extras=True)
        parameters = [
            each.replace(annotation=hints[each.name], kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for each in [*common, *own]
        ]
        # Typer reads a command's options from its signature and annotations.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__doc__, command.__name__ = measure.__doc__, measure.__name__
        return bench.command(called.replace("_", "-"))(command)

    return register


def tell(*said: Any) -> None:
    """Print what a benchmark says on the way, beside its results."""
    Console(stderr=True).print(*said)


def write_page(
    results: Results, write: Callable[[dict[str, Any], dict[str, Any], Path], Path]
) -> NoReturn:
    """Write the page of a table beside it, and end the command."""
    if not results.rows:
        raise ScenarioError(f"{results.path} holds no row yet; measure first, without --page")
    path = results.path.with_suffix(".html")
    typer.echo(write(results.rows, results.measured_with(), path))
    raise typer.Exit


def _show(results: Results, prefix: str) -> None:
    """Print the rows whose name starts with ``prefix``, without it."""
    rows = {name: row for name, row in results.rows.items() if name.startswith(prefix)}
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    table = Table("", *(column.replace("_", " ") for column in columns), title=str(results.path))
    for name, row in rows.items():
        table.add_row(name.removeprefix(prefix), *(_text(row.get(column)) for column in columns))
    print_table(table)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
