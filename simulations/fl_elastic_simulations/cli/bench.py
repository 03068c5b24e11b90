"""``fl-elastic bench``: measurements behind the claims."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fl_elastic.errors import ScenarioError

if TYPE_CHECKING:
    import pandas as pd

    from fl_elastic_simulations.benchmarks.benchmark import Benchmark


BENCHMARKS = {
    "across-rounds": "Compare methods that keep heads and features from round to round with plain ones.",
    "aggregation": "Compare what merging replies costs a server with Flower's FedAvg.",
    "bad-clients": "Train with hostile, broken and lying devices, by every aggregation rule.",
    "budget": "Compare requested and achieved speed-ups on four models.",
    "code-size": "Count code, files, what a device loads, and what a fit and a round run through.",
    "federation": "Compare every method in the same simulated fleets of unequal devices.",
    "memory": "Compare what a step keeps and takes with lean layers, and with plain autograd.",
    "one-device": "Fine-tune MobileNetV2 on one device with a head in closed form and kept features.",
    "read": "Solve for a head without a step: at the last layer, at chosen places, from the input.",
    "side-by-side": "Compare all methods at one budget on one device, on birds or on your own task.",
    "stream": "Compare ways to go through streams that change.",
    "throughput": "Compare what a client-round costs with the bare loop and with Flower's engine.",
}
"""Descriptions of the commands; each command's module in `benchmarks` has a `BENCHMARK`, imported when run."""

_FOLDER = Path("simulations/results")

bench = typer.Typer(help="Measure what the documents claim.", no_args_is_help=True)


def load(name: str) -> Benchmark:
    """Return a benchmark by the name of its command."""
    module = import_module(f"fl_elastic_simulations.benchmarks.{name.replace('-', '_')}")
    found: Benchmark = module.BENCHMARK
    return found


def _rows_file(benchmark: Benchmark) -> Path:
    return _FOLDER / f"{benchmark.file or benchmark.name.replace('-', '_')}.json"


def _command(name: str) -> None:
    @bench.command(name, help=BENCHMARKS[name])
    def run(
        output: Annotated[Path | None, typer.Option(help="File of rows (JSON).")] = None,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Measure existing rows again.")
        ] = False,
        show: Annotated[
            bool, typer.Option("--show", help="Show the rows without measuring.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
        data_root: Annotated[Path | None, typer.Option(help="Folder of the datasets.")] = None,
        workers: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 1,
        task: Annotated[list[str] | None, typer.Option(help="Only this task (repeatable).")] = None,
        method: Annotated[
            list[str] | None, typer.Option(help="Only this method (repeatable).")
        ] = None,
        seed: Annotated[
            list[int] | None, typer.Option(min=0, help="Only this seed (repeatable).")
        ] = None,
        setting: Annotated[
            list[str] | None,
            typer.Option("--set", help="KEY=VALUE, a setting of the benchmark (repeatable)."),
        ] = None,
    ) -> None:
        from fl_elastic_simulations.benchmarks.benchmark import Request, Results
        from fl_elastic_simulations.data.datasets import data_root_folder

        benchmark = load(name)
        results = Results(output or _rows_file(benchmark), fresh=fresh)
        if not show:
            request = Request(
                folder=results.path.with_suffix(""),
                data_root=str(data_root_folder(data_root)),
                tasks=tuple(task or ()),
                methods=tuple(method or ()),
                seeds=tuple(seed or ()),
                settings=dict(map(_setting, setting or ())),
            )
            benchmark.measure(results, request, workers, Console(stderr=True).print)
        if as_json:
            typer.echo(json.dumps(results.rows))
            return
        for title, table in benchmark.tables(results.rows).items():
            _print(title, table)


def _setting(text: str) -> tuple[str, str]:
    key, given, value = text.partition("=")
    if not (key and given):
        raise ScenarioError(f"--set {text}: give KEY=VALUE")
    return key, value


def _print(title: str, table: pd.DataFrame) -> None:
    # Imported here: loading the command line loads the commands of all packages, including this one's.
    from fl_elastic.cli.tables import print_table

    if not table.empty:
        shown = Table(str(table.index.name or ""), *table.columns, title=title)
        for index, *cells in table.fillna("").itertuples():
            shown.add_row(index, *cells)
        print_table(shown)
        for note in table.attrs.get("notes", ()):
            typer.echo(note)


@bench.command()
def fill(
    documents: Annotated[list[Path], typer.Argument(help="Documents with marks of tables.")],
) -> None:
    """Write the tables of the committed rows between the marks in documents."""
    from fl_elastic.state.files import write_atomically
    from fl_elastic_simulations.benchmarks.benchmark import Results
    from fl_elastic_simulations.benchmarks.benchmark import fill as filled

    for document in documents:
        try:
            text = before = document.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ScenarioError(f"cannot read the document {document}: {error}") from None
        for benchmark in map(load, BENCHMARKS):
            if f"<!-- {benchmark.name} " in text:
                text = filled(text, benchmark, Results(_rows_file(benchmark)).rows)
        if text != before:
            write_atomically(document, text.encode())
            typer.echo(f"filled {document}")


for _name in BENCHMARKS:
    _command(_name)
