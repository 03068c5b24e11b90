"""``fl-elastic bench``: measurements behind the claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.cli.benchmark import (
    FOLDER,
    DataRoot,
    Json,
    Method,
    Output,
    Page,
    Seed,
    Shown,
    Task,
    Workers,
    bench,
    benchmark,
    tell,
    write_page,
)

if TYPE_CHECKING:
    from fl_elastic_simulations.benchmarks.results import Results

__all__ = ["bench"]


@benchmark()
def solver(results: Results) -> None:
    """Compare the solver with brute force, and time it."""
    from fl_elastic_simulations.benchmarks.solver import bench_solver

    with Console(stderr=True).status("solving"):
        bench_solver(results)


@benchmark()
def budget(results: Results) -> None:
    """Compare requested and achieved speed-ups on four models."""
    from fl_elastic_simulations.benchmarks.budget import bench_budget

    with Console(stderr=True).status("training"):
        bench_budget(results)


@bench.command()
def house(
    checkouts: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=FOLDER...", help="Checkouts to look at, each with the name of its row."
        ),
    ],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Count what the library and the laboratory are, what a device loads, and what acts run through."""
    from fl_elastic_simulations.benchmarks.house import bench_house, house_markdown
    from fl_elastic_simulations.benchmarks.results import Results

    folders = {}
    for each in checkouts:
        name, given, folder = each.partition("=")
        if not (name and given and folder):
            raise ScenarioError(
                f"{each!r} does not say whose folder it is: give NAME=FOLDER, as in now=."
            )
        folders[name] = Path(folder).resolve()
    results = Results(output or FOLDER / "house.json", fresh=False)
    with Console(stderr=True).status("counting"):
        bench_house(results, folders)
    typer.echo(json.dumps(results.rows) if as_json else house_markdown(results.rows))


@benchmark()
def first_fits(results: Results) -> Shown:
    """Charge first and second fits with everything they do, on eight models of unlike kinds."""
    from fl_elastic_simulations.benchmarks.first_fits import bench_first_fits, first_fits_markdown

    bench_first_fits(results, tell)
    return first_fits_markdown


@benchmark()
def transfer(results: Results, data_root: DataRoot = None, workers: Workers = 2) -> None:
    """Fine-tune MobileNetV2 on fifty bird species in every way: accuracy against training time."""
    from fl_elastic_simulations.benchmarks.transfer import bench_transfer

    bench_transfer(results, data_root, workers=workers, tell=tell)


@benchmark()
def prepare(results: Results, data_root: DataRoot = None, workers: Workers = 1) -> Shown:
    """Compare a small backbone from scratch, from labels, and distilled, on traffic signs and birds."""
    from fl_elastic_simulations.benchmarks.prepare import bench_prepare, prepare_markdown

    bench_prepare(results, data_root, workers=workers, tell=tell)
    return prepare_markdown


@benchmark()
def selector(results: Results, data_root: DataRoot = None, workers: Workers = 1) -> Shown:
    """Compare TinyTrain's choice by Fisher potential with that by a learned selector, and time both."""
    from fl_elastic_simulations.benchmarks.selector import bench_selector, selector_markdown

    bench_selector(results, data_root, workers=workers, tell=tell)
    return selector_markdown


@benchmark(prefix="summary ")
def one_device(
    results: Results,
    data_root: DataRoot = None,
    workers: Workers = 2,
    task: Task = None,
    method: Method = None,
) -> None:
    """Fine-tune MobileNetV2 on one device with a head in closed form and kept features, all of it charged."""
    from fl_elastic_simulations.benchmarks.one_device import bench_one_device

    bench_one_device(
        results, data_root, methods=method or (), tasks=task or (), workers=workers, tell=tell
    )


@benchmark("read", file="where_to_read")
def read(
    results: Results,
    data_root: DataRoot = None,
    workers: Workers = 1,
    task: Task = None,
    seed: Seed = None,
) -> Shown:
    """Solve for a head without a step: at the last layer, at chosen places, from the input or random features."""
    from fl_elastic_simulations.benchmarks.where_to_read import (
        SEEDS,
        TASKS,
        bench_read,
        bench_read_peaks,
        bench_read_sizes,
        read_markdown,
        read_peaks_markdown,
        read_sizes_markdown,
    )

    bench_read(
        results, data_root, tasks=task or (), seeds=seed or SEEDS, workers=workers, tell=tell
    )
    bench_read_sizes(results, data_root, tasks=task or (), workers=workers, tell=tell)
    if not task:
        bench_read_peaks(results, tell)

    def shown(rows: dict[str, dict[str, Any]]) -> str:
        tables = {each.title: read_markdown(rows, name) for name, each in TASKS.items()}
        tables["Fewer features"] = read_sizes_markdown(rows)
        tables["Peaks of fresh processes"] = [read_peaks_markdown(rows)]
        return "\n\n".join("\n".join([title, "", *lines]) for title, lines in tables.items())

    return shown


def _titled(name: str, title: str) -> str:
    return title if title == name else f"{name}: {title}"


@benchmark()
def side_by_side(
    results: Results,
    data_root: DataRoot = None,
    workers: Workers = 1,
    task: Task = None,
    seed: Seed = None,
    method: Method = None,
    model: Annotated[
        str | None, typer.Option(help="Your own task instead: a model's name, or module:callable.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Its data: a dataset's name, or module:callable.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Its images are scaled to this height and width.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Its examples of a step.")] = 16,
    passes: Annotated[int, typer.Option(min=1, help="Its passes over the data.")] = 6,
    rate: Annotated[float, typer.Option(help="Its learning rate, of AdamW.")] = 1e-3,
    head_rate: Annotated[float, typer.Option(help="That of a head alone.")] = 1e-2,
) -> Shown:
    """Compare all methods at one budget: on birds, few-shot signs, a vision transformer, or your own task."""
    from fl_elastic_simulations.benchmarks.side_by_side import (
        SEEDS,
        bench_side_by_side,
        side_by_side_markdown,
    )
    from fl_elastic_simulations.benchmarks.side_by_side_tasks import TASKS, own_task

    among = TASKS
    if model or dataset:
        if not (model and dataset):
            raise ScenarioError("a task of your own has a --model and a --dataset: give both")
        if results.path == FOLDER / "side_by_side.json":
            raise ScenarioError("give your own task a table of its own: --output my-task.json")
        own = own_task(
            model, dataset, image_size=image_size, batch_size=batch_size,
            passes=passes, rate=rate, head_rate=head_rate,
        )  # fmt: skip
        among = {own.title: own}
    bench_side_by_side(
        results, data_root, tasks=task or (), methods=method or (), seeds=seed or SEEDS,
        workers=workers, tell=tell, among=among,
    )  # fmt: skip
    return lambda rows: "\n\n".join(
        "\n".join([_titled(name, each.title), "", *side_by_side_markdown(rows, name, each)])
        for name, each in among.items()
    )


@benchmark(prefix="summary ")
def federation(
    results: Results,
    data_root: DataRoot = None,
    workers: Workers = 2,
    task: Task = None,
    seed: Seed = None,
    method: Method = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A quarter of the time of two tasks, one seed.")
    ] = False,
    page: Page = False,
) -> None:
    """Compare every method in the same simulated fleets of unequal devices."""
    from fl_elastic_simulations.benchmarks.federation import SEEDS, bench_federation
    from fl_elastic_simulations.benchmarks.federation_page import write_federation_page

    if page:
        write_page(results, write_federation_page)
    bench_federation(
        results,
        data_root,
        tasks=task or (),
        seeds=seed or SEEDS,
        methods=method or (),
        quick=quick,
        workers=workers,
        tell=tell,
    )


@benchmark(prefix="summary ")
def across_rounds(
    results: Results,
    data_root: DataRoot = None,
    workers: Workers = 2,
    task: Task = None,
    seed: Seed = None,
    method: Method = None,
) -> None:
    """Compare methods that keep heads and features from round to round with plain ones, on pretrained models."""
    from fl_elastic_simulations.benchmarks.federation import SEEDS, bench_federation
    from fl_elastic_simulations.benchmarks.federation_tasks import CONVERGED, LONGER, PRETRAINED

    bench_federation(
        results,
        data_root,
        among=PRETRAINED | CONVERGED | LONGER,
        tasks=task or (),
        seeds=seed or SEEDS,
        methods=method or (),
        workers=workers,
        tell=tell,
    )


@benchmark(prefix="summary ")
def lora(
    results: Results,
    data_root: DataRoot = None,
    workers: Workers = 1,
    task: Task = None,
    seed: Seed = None,
    method: Method = None,
) -> None:
    """Train adapters of models of text and images on unequal devices in every way, from weights pretrained here."""
    from fl_elastic_simulations.benchmarks.lora import SEEDS, bench_lora

    bench_lora(
        results, data_root, tasks=task or (), seeds=seed or SEEDS, methods=method or (),
        workers=workers, tell=tell,
    )  # fmt: skip


@benchmark()
def forget(
    results: Results, data_root: DataRoot = None, task: Task = None, seed: Seed = None
) -> None:
    """Let trained models forget a class or some examples, in six ways."""
    from fl_elastic_simulations.benchmarks.forgetting import bench_forget

    bench_forget(results, data_root, tasks=task or (), seeds=seed or (0, 1, 2), tell=tell)


@benchmark("stream-federation", prefix="summary ")
def stream_federation(results: Results, data_root: DataRoot = None, workers: Workers = 1) -> None:
    """Let ten devices meet a changed world at different times, each alone and together."""
    from fl_elastic_simulations.benchmarks.stream_federation import bench_stream_federation

    bench_stream_federation(results, data_root, workers=workers, tell=tell)


@benchmark()
def aggregation(results: Results) -> None:
    """Compare what merging replies costs a server with Flower's FedAvg."""
    from fl_elastic_simulations.benchmarks.aggregation import bench_aggregation

    with Console(stderr=True).status("merging"):
        bench_aggregation(results)


@benchmark()
def poison(results: Results) -> None:
    """Train with two hostile devices of ten, by every aggregation rule."""
    from fl_elastic_simulations.benchmarks.poison import bench_poison

    with Console(stderr=True).status("training"):
        bench_poison(results)


@benchmark()
def liars(results: Results) -> None:
    """Train with one or two devices of ten that lie in ways a rule does not look at, by every rule."""
    from fl_elastic_simulations.benchmarks.liars import bench_liars

    bench_liars(results, tell)


@benchmark()
def server_rates(results: Results) -> None:
    """Take longer server steps with and without running statistics: what they gain and risk."""
    from fl_elastic_simulations.benchmarks.server_rates import bench_server_rates

    bench_server_rates(results, tell)


@benchmark()
def startup(results: Results) -> None:
    """Time a node's process from a message to its first batch, and weigh an idle node."""
    from fl_elastic_simulations.benchmarks.startup import bench_startup

    bench_startup(results, tell)


@benchmark()
def fleet(results: Results, data_root: DataRoot = None) -> None:
    """Compare a real fleet on this machine with the simulation of the same scenario."""
    from fl_elastic_simulations.benchmarks.fleet import bench_fleet

    bench_fleet(results, data_root, tell)


@benchmark()
def transport(results: Results) -> None:
    """Send a model through a real server packed and unpacked."""
    from fl_elastic_simulations.benchmarks.transport import bench_transport

    bench_transport(results, tell)


@benchmark()
def memory(results: Results) -> None:
    """Compare what a step keeps and takes with lean layers, and with plain autograd."""
    from fl_elastic_simulations.benchmarks.memory import bench_memory

    with Console(stderr=True).status("training"):
        bench_memory(results)


@benchmark()
def fit_peaks(results: Results) -> Shown:
    """Measure whether first fits of fresh processes hold memory budgets, on eight models of unlike kinds."""
    from fl_elastic_simulations.benchmarks.fit_peaks import bench_fit_peaks, fit_peaks_markdown

    bench_fit_peaks(results, tell)
    return fit_peaks_markdown


@benchmark("filter")
def filter_(results: Results, data_root: DataRoot = None) -> None:
    """Compare filtered gradients with exact ones: time, direction, and what is chosen."""
    from fl_elastic_simulations.benchmarks.filter import bench_filter

    with Console(stderr=True).status("measuring"):
        bench_filter(results, data_root)


@benchmark()
def stream(
    results: Results,
    data_root: DataRoot = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    task: Task = None,
    method: Method = None,
    seed: Seed = None,
    page: Page = False,
) -> Shown:
    """Compare ways to go through streams that change: accuracy, forgetting, recovery, seconds, memory."""
    from fl_elastic_simulations.benchmarks.stream import SEEDS, bench_stream, write_streams_page
    from fl_elastic_simulations.benchmarks.stream_methods import METHODS
    from fl_elastic_simulations.benchmarks.stream_summary import stream_cells
    from fl_elastic_simulations.benchmarks.stream_tasks import TASKS

    if page:
        write_page(results, write_streams_page)
    bench_stream(
        results, data_root, tasks=task or (), methods=method or (), seeds=seed or SEEDS,
        workers=workers, tell=tell,
    )  # fmt: skip

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


@benchmark()
def online(
    results: Results, data_root: DataRoot = None, workers: Workers = 1, task: Task = None
) -> Shown:
    """Compare the stream learner's defaults with online learners: prequential accuracy and processor time."""
    from fl_elastic_simulations.benchmarks.online import bench_online, online_markdown

    bench_online(results, data_root, streams=task or (), workers=workers, tell=tell)
    return online_markdown


@benchmark()
def soak(
    results: Results,
    data_root: DataRoot = None,
    samples: Annotated[int, typer.Option(min=50_000, help="Length of the stream.")] = 1_000_000,
) -> None:
    """Stream a million samples through a learner: throughput, memory and the store's bound."""
    from fl_elastic_simulations.benchmarks.soak import bench_soak

    bench_soak(results, data_root, samples=samples, tell=tell)
