"""Ways to go through streams that change: accuracy, forgetting, recovery, seconds, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fl_elastic.environment import environment
from fl_elastic_simulations.benchmarks.cells import chosen_tasks, finished_cells
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.stream_cell import run_stream
from fl_elastic_simulations.benchmarks.stream_methods import METHODS
from fl_elastic_simulations.benchmarks.stream_page import write_streams_page
from fl_elastic_simulations.benchmarks.stream_summary import summarise_stream
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS
from fl_elastic_simulations.data.datasets import data_root_folder

__all__ = ["SEEDS", "bench_stream"]

SEEDS = (0, 1, 2)


def bench_stream(
    results: Results,
    data_root: str | Path | None = None,
    *,
    tasks: Iterable[str] = (),
    seeds: Iterable[int] = SEEDS,
    workers: int = 1,
    tell: Callable[[str], None] = print,
) -> None:
    """Run every method on every stream with every seed; finished cells are kept.

    Parameters
    ----------
    results : Results
        The table.
    data_root : path-like, optional
        Where the datasets are.
    tasks : iterable of str
        Names in `TASKS`; all of them if none is given.
    seeds : iterable of int
        Of streams, first weights and batches.
    workers : int
        Cells at a time, each on one core.
    tell : callable
        Hears of each finished cell.

    Raises
    ------
    ScenarioError
        If a task is unknown.
    """
    root = str(data_root_folder(data_root))
    names = chosen_tasks(tasks, TASKS)
    cells = {
        f"{name} | {method} | {seed}": (name, method, seed, root)
        for name in names
        for seed in seeds
        for method in METHODS
        if f"{name} | {method} | {seed}" not in results.rows
    }
    try:
        for done, (cell, row) in enumerate(finished_cells(run_stream, cells, workers), start=1):
            results.add(cell, row)
            accuracy = row.get("average", row["prequential"])
            tell(
                f"{done}/{len(cells)} {cell}: {accuracy:.3f}, {row['adapting_seconds']:.1f} s of adapting"
            )
    finally:
        # Also where it was interrupted: what is there is worth a table.
        for name in names:
            for method, row in summarise_stream(results.rows, name).items():
                results.add(f"summary {name} | {method}", row)
        if results.rows:
            write_streams_page(results.rows, environment(), results.path.with_suffix(".html"))
