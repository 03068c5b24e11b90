"""``fl-elastic bench``: measurements behind the claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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


@bench.command()
def solver(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Compare the solver with brute force, and time it."""
    from fl_elastic_simulations.benchmarks import Results, bench_solver

    results = Results(output or _FOLDER / "solver.json", fresh=fresh)
    with Console(stderr=True).status("solving"):
        bench_solver(results)
    _show(results, as_json)


@bench.command()
def budget(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Compare requested and achieved speed-ups on four models."""
    from fl_elastic_simulations.benchmarks import Results, bench_budget

    results = Results(output or _FOLDER / "budget.json", fresh=fresh)
    with Console(stderr=True).status("training"):
        bench_budget(results)
    _show(results, as_json)


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


@bench.command("first-fits")
def first_fits(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Charge first and second fits with everything they do, on eight models of unlike kinds."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.first_fits import bench_first_fits, first_fits_markdown

    results = Results(output or _FOLDER / "first_fits.json", fresh=fresh)
    bench_first_fits(results, Console(stderr=True).print)
    typer.echo(json.dumps(results.rows) if as_json else first_fits_markdown(results.rows))


@bench.command()
def transfer(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 2,
) -> None:
    """Fine-tune MobileNetV2 on fifty bird species in every way: accuracy against training time."""
    from fl_elastic_simulations.benchmarks import Results, bench_transfer

    results = Results(output or _FOLDER / "transfer.json", fresh=fresh)
    console = Console(stderr=True)
    bench_transfer(results, data_root, workers=workers, tell=console.print)
    _show(results, as_json)


@bench.command()
def prepare(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 1,
) -> None:
    """Compare a small backbone from scratch, from labels, and distilled, on traffic signs and birds."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.prepare import bench_prepare, prepare_markdown

    results = Results(output or _FOLDER / "prepare.json", fresh=fresh)
    bench_prepare(results, data_root, workers=workers, tell=Console(stderr=True).print)
    typer.echo(json.dumps(results.rows) if as_json else prepare_markdown(results.rows))


@bench.command()
def selector(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 1,
) -> None:
    """Compare TinyTrain's choice by Fisher potential with that by a learned selector, and time both."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.selector import bench_selector, selector_markdown

    results = Results(output or _FOLDER / "selector.json", fresh=fresh)
    bench_selector(results, data_root, workers=workers, tell=Console(stderr=True).print)
    typer.echo(json.dumps(results.rows) if as_json else selector_markdown(results.rows))


@bench.command("one-device")
def one_device(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 2,
    method: _Method = None,
) -> None:
    """Fine-tune MobileNetV2 on one device with a head in closed form and kept features, all of it charged."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.one_device import bench_one_device

    results = Results(output or _FOLDER / "one_device.json", fresh=fresh)
    tell = Console(stderr=True).print
    bench_one_device(results, data_root, methods=method or (), workers=workers, tell=tell)
    _show(results, as_json, prefix="summary ")


@bench.command("side-by-side")
def side_by_side(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 1,
    task: _Task = None,
    seed: _Seed = None,
    method: _Method = None,
) -> None:
    """Compare all methods at one budget: transfer to birds, few-shot traffic signs, a vision transformer."""
    from fl_elastic_simulations.benchmarks import Results, bench_side_by_side
    from fl_elastic_simulations.benchmarks.side_by_side import SEEDS, side_by_side_markdown
    from fl_elastic_simulations.benchmarks.side_by_side_tasks import TASKS

    results = Results(output or _FOLDER / "side_by_side.json", fresh=fresh)
    bench_side_by_side(
        results, data_root,
        tasks=task or (), methods=method or (), seeds=seed or SEEDS, workers=workers,
        tell=Console(stderr=True).print,
    )  # fmt: skip
    tables = (
        "\n".join([f"{name}: {each.title}", "", *side_by_side_markdown(results.rows, name)])
        for name, each in TASKS.items()
    )
    typer.echo(json.dumps(results.rows) if as_json else "\n\n".join(tables))


@bench.command()
def federation(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
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
    from fl_elastic_simulations.benchmarks import Results, bench_federation
    from fl_elastic_simulations.benchmarks.federation import SEEDS
    from fl_elastic_simulations.benchmarks.federation_page import write_federation_page

    name = "federation-quick.json" if quick else "federation.json"
    results = Results(output or _FOLDER / name, fresh=fresh)
    if page:
        return _write_page(results, write_federation_page)
    bench_federation(
        results, data_root,
        tasks=task or (), seeds=seed or SEEDS, methods=method or (), quick=quick, workers=workers,
        tell=Console(stderr=True).print,
    )  # fmt: skip
    _show(results, as_json, prefix="summary ")


@bench.command("across-rounds")
def across_rounds(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 2,
    task: _Task = None,
    seed: _Seed = None,
    method: _Method = None,
) -> None:
    """Compare methods that keep heads and features from round to round with plain ones, on pretrained models."""
    from fl_elastic_simulations.benchmarks import Results, bench_federation
    from fl_elastic_simulations.benchmarks.federation import SEEDS
    from fl_elastic_simulations.benchmarks.federation_tasks import CONVERGED, PRETRAINED

    results = Results(output or _FOLDER / "across_rounds.json", fresh=fresh)
    bench_federation(
        results, data_root,
        among=PRETRAINED | CONVERGED, tasks=task or (), seeds=seed or SEEDS, methods=method or (), workers=workers,
        tell=Console(stderr=True).print,
    )  # fmt: skip
    _show(results, as_json, prefix="summary ")


@bench.command()
def lora(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 1,
    seed: _Seed = None,
    method: _Method = None,
) -> None:
    """Train adapters of a language model on unequal devices in every way, from weights pretrained here."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.lora import SEEDS, bench_lora

    results = Results(output or _FOLDER / "lora.json", fresh=fresh)
    bench_lora(
        results, data_root,
        seeds=seed or SEEDS, methods=method or (), workers=workers, tell=Console(stderr=True).print,
    )  # fmt: skip
    _show(results, as_json, prefix="summary ")


@bench.command()
def forget(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    task: _Task = None,
    seed: _Seed = None,
) -> None:
    """Let trained models forget a class or some examples, in six ways."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.forgetting import bench_forget

    results = Results(output or _FOLDER / "forget.json", fresh=fresh)
    bench_forget(
        results, data_root,
        tasks=task or (), seeds=seed or (0, 1, 2), tell=Console(stderr=True).print,
    )  # fmt: skip
    _show(results, as_json)


@bench.command("stream-federation")
def stream_federation(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 1,
) -> None:
    """Let ten devices meet a changed world at different times, each alone and together."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.stream_federation import bench_stream_federation

    results = Results(output or _FOLDER / "stream-federation.json", fresh=fresh)
    tell = Console(stderr=True).print
    bench_stream_federation(results, data_root, workers=workers, tell=tell)
    _show(results, as_json, prefix="summary ")


@bench.command()
def aggregation(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Compare what merging replies costs a server with Flower's FedAvg."""
    from fl_elastic_simulations.benchmarks import Results, bench_aggregation

    results = Results(output or _FOLDER / "aggregation.json", fresh=fresh)
    with Console(stderr=True).status("merging"):
        bench_aggregation(results)
    _show(results, as_json)


@bench.command()
def poison(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Train with two hostile devices of ten, by every aggregation rule."""
    from fl_elastic_simulations.benchmarks import Results, bench_poison

    results = Results(output or _FOLDER / "poison.json", fresh=fresh)
    with Console(stderr=True).status("training"):
        bench_poison(results)
    _show(results, as_json)


@bench.command()
def liars(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Train with one or two devices of ten that lie in ways a rule does not look at, by every rule."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.liars import bench_liars

    results = Results(output or _FOLDER / "liars.json", fresh=fresh)
    bench_liars(results, Console(stderr=True).print)
    _show(results, as_json)


@bench.command("server-rates")
def server_rates(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Take longer server steps with and without running statistics: what they gain and risk."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.server_rates import bench_server_rates

    results = Results(output or _FOLDER / "server_rates.json", fresh=fresh)
    bench_server_rates(results, Console(stderr=True).print)
    _show(results, as_json)


@bench.command()
def startup(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Time a node's process from a message to its first batch, and weigh an idle node."""
    from fl_elastic_simulations.benchmarks import Results, bench_startup

    results = Results(output or _FOLDER / "startup.json", fresh=fresh)
    bench_startup(results, Console(stderr=True).print)
    _show(results, as_json)


@bench.command()
def fleet(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
) -> None:
    """Compare a real fleet on this machine with the simulation of the same scenario."""
    from fl_elastic_simulations.benchmarks import Results, bench_fleet

    results = Results(output or _FOLDER / "fleet.json", fresh=fresh)
    bench_fleet(results, data_root, Console(stderr=True).print)
    _show(results, as_json)


@bench.command()
def transport(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Send a model through a real server packed and unpacked."""
    from fl_elastic_simulations.benchmarks import Results, bench_transport

    results = Results(output or _FOLDER / "transport.json", fresh=fresh)
    bench_transport(results, Console(stderr=True).print)
    _show(results, as_json)


@bench.command()
def memory(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Compare what a step keeps and takes with lean layers, and with plain autograd."""
    from fl_elastic_simulations.benchmarks import Results, bench_memory

    results = Results(output or _FOLDER / "memory.json", fresh=fresh)
    with Console(stderr=True).status("training"):
        bench_memory(results)
    _show(results, as_json)


@bench.command("fit-peaks")
def fit_peaks(output: _Output = None, fresh: _Fresh = False, as_json: _Json = False) -> None:
    """Measure whether first fits of fresh processes hold memory budgets, on eight models of unlike kinds."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.fit_peaks import bench_fit_peaks, fit_peaks_markdown

    results = Results(output or _FOLDER / "fit_peaks.json", fresh=fresh)
    bench_fit_peaks(results, Console(stderr=True).print)
    typer.echo(json.dumps(results.rows) if as_json else fit_peaks_markdown(results.rows))


@bench.command("filter")
def filter_(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
) -> None:
    """Compare filtered gradients with exact ones: time, direction, and what is chosen."""
    from fl_elastic_simulations.benchmarks import Results, bench_filter

    results = Results(output or _FOLDER / "filter.json", fresh=fresh)
    with Console(stderr=True).status("measuring"):
        bench_filter(results, data_root)
    _show(results, as_json)


@bench.command()
def stream(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    task: _Task = None,
    seed: _Seed = None,
    page: _Page = False,
) -> None:
    """Compare ways to go through streams that change: accuracy, forgetting, recovery, seconds, memory."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.stream import SEEDS, bench_stream, write_streams_page
    from fl_elastic_simulations.benchmarks.stream_methods import METHODS
    from fl_elastic_simulations.benchmarks.stream_summary import stream_cells
    from fl_elastic_simulations.benchmarks.stream_tasks import TASKS

    results = Results(output or _FOLDER / "stream.json", fresh=fresh)
    if page:
        return _write_page(results, write_streams_page)
    bench_stream(
        results, data_root, tasks=task or (), seeds=seed or SEEDS, workers=workers,
        tell=Console(stderr=True).print,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(results.rows))
        return
    for name in TASKS:
        found = {
            method: stream_cells(row)
            for method in METHODS
            if (row := results.rows.get(f"summary {name} | {method}"))
        }
        table = Table("", *next(iter(found.values()), ()), title=TASKS[name].title)
        for method, cells in found.items():
            table.add_row(method, *cells.values())
        if found:
            Console().print(table)


@bench.command()
def online(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    workers: _Workers = 1,
    task: _Task = None,
) -> None:
    """Compare the stream learner's defaults with online learners: prequential accuracy and processor time."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.online import bench_online, online_markdown

    results = Results(output or _FOLDER / "online.json", fresh=fresh)
    bench_online(
        results, data_root, streams=task or (), workers=workers, tell=Console(stderr=True).print
    )
    typer.echo(json.dumps(results.rows) if as_json else online_markdown(results.rows))


@bench.command()
def soak(
    output: _Output = None,
    fresh: _Fresh = False,
    as_json: _Json = False,
    data_root: _DataRoot = None,
    samples: Annotated[int, typer.Option(min=50_000, help="Length of the stream.")] = 1_000_000,
) -> None:
    """Stream a million samples through a learner: throughput, memory and the store's bound."""
    from fl_elastic_simulations.benchmarks import Results
    from fl_elastic_simulations.benchmarks.soak import bench_soak

    results = Results(output or _FOLDER / "soak.json", fresh=fresh)
    bench_soak(results, data_root, samples=samples, tell=Console(stderr=True).print)
    _show(results, as_json)


def _write_page(
    results: Results, write: Callable[[dict[str, Any], dict[str, Any], Path], Path]
) -> None:
    """Write the page of a table beside it."""
    if not results.rows:
        raise ScenarioError(f"{results.path} holds no row yet; measure first, without --page")
    path = results.path.with_suffix(".html")
    typer.echo(write(results.rows, results.measured_with(), path))


def _show(results: Results, as_json: bool, prefix: str = "") -> None:
    """Print the rows whose name starts with ``prefix``, without it."""
    if as_json:
        typer.echo(json.dumps(results.rows))
        return
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
