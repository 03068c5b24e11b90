"""``fl-elastic bench``: measurements behind the claims."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fl_elastic.errors import ScenarioError

if TYPE_CHECKING:
    from fl_elastic_simulations.benchmarks import Results

__all__ = ["bench"]

bench = typer.Typer(help="Measure what docs/measured.md claims.", no_args_is_help=True)

_FOLDER = Path("simulations/results")
_Output = Annotated[Path | None, typer.Option(help="File of the table (JSON).")]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what is already there.")]
_DataRoot = Annotated[Path | None, typer.Option(help="Folder that holds the datasets.")]
_Workers = Annotated[int, typer.Option(min=1, help="Runs at a time.")]
_Task = Annotated[list[str] | None, typer.Option(help="Run this task only (repeatable).")]
_Seed = Annotated[list[int] | None, typer.Option(min=0, help="Run this seed only (repeatable).")]
_Method = Annotated[list[str] | None, typer.Option(help="Run this method only (repeatable).")]
_Page = Annotated[
    bool, typer.Option("--page", help="Write the page of what is there; measure nothing.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the table as JSON.")]

_Shown = Callable[[dict[str, dict[str, Any]]], "str | list[Table]"]
"""What a benchmark shows of its rows, where that is not the table of all of them."""


def _benchmark(
    name: str | None = None, *, prefix: str = ""
) -> Callable[[Callable[..., _Shown | None]], object]:
    """Return a decorator that makes a command of a function that measures into the results it is given.

    The command has the options of every benchmark, then those of the function.

    Parameters
    ----------
    name : str, optional
        Of the command and of its file of results, where it is not the function's; with ``--quick`` the file is
        another one.
    prefix : str
        What the names of the rows begin with that are shown.
    """

    def register(measure: Callable[..., _Shown | None]) -> object:
        called = name or measure.__name__

        def command(
            output: _Output = None, fresh: _Fresh = False, as_json: _Json = False, **options: Any
        ) -> None:
            from fl_elastic_simulations.benchmarks import Results

            file = f"{called}{'-quick' if options.get('quick') else ''}.json"
            results = Results(output or _FOLDER / file, fresh=fresh)
            shown = measure(results, **options)
            if as_json:
                typer.echo(json.dumps(results.rows))
            elif shown is None:
                _show(results, prefix)
            elif isinstance(found := shown(results.rows), str):
                typer.echo(found)
            else:
                for table in found:
                    Console().print(table)

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


def _tell(*said: Any) -> None:
    Console(stderr=True).print(*said)


@_benchmark()
def solver(results: Results) -> None:
    """Compare the solver with brute force, and time it."""
    from fl_elastic_simulations.benchmarks import bench_solver

    with Console(stderr=True).status("solving"):
        bench_solver(results)


@_benchmark()
def budget(results: Results) -> None:
    """Compare requested and achieved speed-ups on four models."""
    from fl_elastic_simulations.benchmarks import bench_budget

    with Console(stderr=True).status("training"):
        bench_budget(results)


@bench.command()
def house(
    checkout: Annotated[Path, typer.Option(help="Folder of the checkout to look at.")] = Path(),
    name: Annotated[str, typer.Option(help="Name of the row.")] = "now",
    output: _Output = None,
    as_json: _Json = False,
) -> None:
    """Count what the library and the laboratory are, what a device loads, and what acts run through."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.house import bench_house, house_markdown

    results = Results(output or _FOLDER / "house.json", fresh=False)
    with Console(stderr=True).status("counting"):
        bench_house(results, checkout.resolve(), name)
    typer.echo(json.dumps(results.rows) if as_json else house_markdown(results.rows))


@_benchmark()
def first_fits(results: Results) -> _Shown:
    """Charge first and second fits with everything they do, on eight models of unlike kinds."""
    from fl_elastic_simulations.benchmarks.first_fits import bench_first_fits, first_fits_markdown

    bench_first_fits(results, _tell)
    return first_fits_markdown


@_benchmark()
def transfer(results: Results, data_root: _DataRoot = None, workers: _Workers = 2) -> None:
    """Fine-tune MobileNetV2 on fifty bird species in every way: accuracy against training time."""
    from fl_elastic_simulations.benchmarks import bench_transfer

    bench_transfer(results, data_root, workers=workers, tell=_tell)


@_benchmark()
def prepare(results: Results, data_root: _DataRoot = None, workers: _Workers = 1) -> _Shown:
    """Compare a small backbone from scratch, from labels, and distilled, on traffic signs and birds."""
    from fl_elastic_simulations.benchmarks.prepare import bench_prepare, prepare_markdown

    bench_prepare(results, data_root, workers=workers, tell=_tell)
    return prepare_markdown


@_benchmark()
def selector(results: Results, data_root: _DataRoot = None, workers: _Workers = 1) -> _Shown:
    """Compare TinyTrain's choice by Fisher potential with that by a learned selector, and time both."""
    from fl_elastic_simulations.benchmarks.selector import bench_selector, selector_markdown

    bench_selector(results, data_root, workers=workers, tell=_tell)
    return selector_markdown


@_benchmark(prefix="summary ")
def one_device(
    results: Results, data_root: _DataRoot = None, workers: _Workers = 2, method: _Method = None
) -> None:
    """Fine-tune MobileNetV2 on one device with a head in closed form and kept features, all of it charged."""
    from fl_elastic_simulations.benchmarks.one_device import bench_one_device

    bench_one_device(results, data_root, methods=method or (), workers=workers, tell=_tell)


@_benchmark()
def side_by_side(
    results: Results,
    data_root: _DataRoot = None,
    workers: _Workers = 1,
    task: _Task = None,
    seed: _Seed = None,
    method: _Method = None,
) -> _Shown:
    """Compare all methods at one budget: transfer to birds, few-shot traffic signs, a vision transformer."""
    from fl_elastic_simulations.benchmarks import bench_side_by_side
    from fl_elastic_simulations.benchmarks.side_by_side import SEEDS, side_by_side_markdown
    from fl_elastic_simulations.benchmarks.side_by_side_tasks import TASKS

    bench_side_by_side(
        results, data_root,
        tasks=task or (), methods=method or (), seeds=seed or SEEDS, workers=workers, tell=_tell,
    )  # fmt: skip
    return lambda rows: "\n\n".join(
        "\n".join([f"{name}: {each.title}", "", *side_by_side_markdown(rows, name)])
        for name, each in TASKS.items()
    )


@_benchmark(prefix="summary ")
def federation(
    results: Results,
    data_root: _DataRoot = None,
    workers: _Workers = 2,
    task: _Task = None,
    seed: _Seed = None,
    method: _Method = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A quarter of the time of two tasks, one seed.")
    ] = False,
    page: _Page = False,
) -> None:
    """Compare every method in the same simulated fleets of unequal devices."""
    from fl_elastic_simulations.benchmarks import bench_federation
    from fl_elastic_simulations.benchmarks.federation import SEEDS
    from fl_elastic_simulations.benchmarks.federation_page import write_federation_page

    if page:
        _write_page(results, write_federation_page)
    bench_federation(
        results,
        data_root,
        tasks=task or (),
        seeds=seed or SEEDS,
        methods=method or (),
        quick=quick,
        workers=workers,
        tell=_tell,
    )


@_benchmark(prefix="summary ")
def across_rounds(
    results: Results,
    data_root: _DataRoot = None,
    workers: _Workers = 2,
    task: _Task = None,
    seed: _Seed = None,
    method: _Method = None,
) -> None:
    """Compare methods that keep heads and features from round to round with plain ones, on pretrained models."""
    from fl_elastic_simulations.benchmarks import bench_federation
    from fl_elastic_simulations.benchmarks.federation import SEEDS
    from fl_elastic_simulations.benchmarks.federation_tasks import CONVERGED, PRETRAINED

    bench_federation(
        results,
        data_root,
        among=PRETRAINED | CONVERGED,
        tasks=task or (),
        seeds=seed or SEEDS,
        methods=method or (),
        workers=workers,
        tell=_tell,
    )


@_benchmark(prefix="summary ")
def lora(
    results: Results,
    data_root: _DataRoot = None,
    workers: _Workers = 1,
    seed: _Seed = None,
    method: _Method = None,
) -> None:
    """Train adapters of a language model on unequal devices in every way, from weights pretrained here."""
    from fl_elastic_simulations.benchmarks.lora import SEEDS, bench_lora

    bench_lora(
        results, data_root, seeds=seed or SEEDS, methods=method or (), workers=workers, tell=_tell
    )


@_benchmark()
def forget(
    results: Results, data_root: _DataRoot = None, task: _Task = None, seed: _Seed = None
) -> None:
    """Let trained models forget a class or some examples, in six ways."""
    from fl_elastic_simulations.benchmarks.forgetting import bench_forget

    bench_forget(results, data_root, tasks=task or (), seeds=seed or (0, 1, 2), tell=_tell)


@_benchmark("stream-federation", prefix="summary ")
def stream_federation(results: Results, data_root: _DataRoot = None, workers: _Workers = 1) -> None:
    """Let ten devices meet a changed world at different times, each alone and together."""
    from fl_elastic_simulations.benchmarks.stream_federation import bench_stream_federation

    bench_stream_federation(results, data_root, workers=workers, tell=_tell)


@_benchmark()
def aggregation(results: Results) -> None:
    """Compare what merging replies costs a server with Flower's FedAvg."""
    from fl_elastic_simulations.benchmarks import bench_aggregation

    with Console(stderr=True).status("merging"):
        bench_aggregation(results)


@_benchmark()
def poison(results: Results) -> None:
    """Train with two hostile devices of ten, by every aggregation rule."""
    from fl_elastic_simulations.benchmarks import bench_poison

    with Console(stderr=True).status("training"):
        bench_poison(results)


@_benchmark()
def liars(results: Results) -> None:
    """Train with one or two devices of ten that lie in ways a rule does not look at, by every rule."""
    from fl_elastic_simulations.benchmarks.liars import bench_liars

    bench_liars(results, _tell)


@_benchmark()
def server_rates(results: Results) -> None:
    """Take longer server steps with and without running statistics: what they gain and risk."""
    from fl_elastic_simulations.benchmarks.server_rates import bench_server_rates

    bench_server_rates(results, _tell)


@_benchmark()
def startup(results: Results) -> None:
    """Time a node's process from a message to its first batch, and weigh an idle node."""
    from fl_elastic_simulations.benchmarks import bench_startup

    bench_startup(results, _tell)


@_benchmark()
def fleet(results: Results, data_root: _DataRoot = None) -> None:
    """Compare a real fleet on this machine with the simulation of the same scenario."""
    from fl_elastic_simulations.benchmarks import bench_fleet

    bench_fleet(results, data_root, _tell)


@_benchmark()
def transport(results: Results) -> None:
    """Send a model through a real server packed and unpacked."""
    from fl_elastic_simulations.benchmarks import bench_transport

    bench_transport(results, _tell)


@_benchmark()
def memory(results: Results) -> None:
    """Compare what a step keeps and takes with lean layers, and with plain autograd."""
    from fl_elastic_simulations.benchmarks import bench_memory

    with Console(stderr=True).status("training"):
        bench_memory(results)


@_benchmark()
def fit_peaks(results: Results) -> _Shown:
    """Measure whether first fits of fresh processes hold memory budgets, on eight models of unlike kinds."""
    from fl_elastic_simulations.benchmarks.fit_peaks import bench_fit_peaks, fit_peaks_markdown

    bench_fit_peaks(results, _tell)
    return fit_peaks_markdown


@_benchmark("filter")
def filter_(results: Results, data_root: _DataRoot = None) -> None:
    """Compare filtered gradients with exact ones: time, direction, and what is chosen."""
    from fl_elastic_simulations.benchmarks import bench_filter

    with Console(stderr=True).status("measuring"):
        bench_filter(results, data_root)


@_benchmark()
def stream(
    results: Results,
    data_root: _DataRoot = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    task: _Task = None,
    seed: _Seed = None,
    page: _Page = False,
) -> _Shown:
    """Compare ways to go through streams that change: accuracy, forgetting, recovery, seconds, memory."""
    from fl_elastic_simulations.benchmarks.stream import SEEDS, bench_stream, write_streams_page
    from fl_elastic_simulations.benchmarks.stream_methods import METHODS
    from fl_elastic_simulations.benchmarks.stream_summary import stream_cells
    from fl_elastic_simulations.benchmarks.stream_tasks import TASKS

    if page:
        _write_page(results, write_streams_page)
    bench_stream(
        results, data_root, tasks=task or (), seeds=seed or SEEDS, workers=workers, tell=_tell
    )

    def tables(rows: dict[str, dict[str, Any]]) -> list[Table]:
        shown = []
        for name in TASKS:
            found = {
                method: stream_cells(row)
                for method in METHODS
                if (row := rows.get(f"summary {name} | {method}"))
            }
            table = Table("", *next(iter(found.values()), ()), title=TASKS[name].title)
            for method, cells in found.items():
                table.add_row(method, *cells.values())
            shown += [table] if found else []
        return shown

    return tables


@_benchmark()
def online(
    results: Results, data_root: _DataRoot = None, workers: _Workers = 1, task: _Task = None
) -> _Shown:
    """Compare the stream learner's defaults with online learners: prequential accuracy and processor time."""
    from fl_elastic_simulations.benchmarks.online import bench_online, online_markdown

    bench_online(results, data_root, streams=task or (), workers=workers, tell=_tell)
    return online_markdown


@_benchmark()
def soak(
    results: Results,
    data_root: _DataRoot = None,
    samples: Annotated[int, typer.Option(min=50_000, help="Length of the stream.")] = 1_000_000,
) -> None:
    """Stream a million samples through a learner: throughput, memory and the store's bound."""
    from fl_elastic_simulations.benchmarks.soak import bench_soak

    bench_soak(results, data_root, samples=samples, tell=_tell)


def _write_page(
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
    console = Console()
    # A line that wraps can be read; columns of one letter cannot.
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(width=max(console.width, needed)).print(table)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
