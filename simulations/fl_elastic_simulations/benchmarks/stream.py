"""Ways to go through streams that change: accuracy, forgetting, recovery, seconds, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fl_elastic_simulations.benchmarks.cells import add_missing, chosen_tasks
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.stream_cell import run_stream
from fl_elastic_simulations.benchmarks.stream_methods import METHODS
from fl_elastic_simulations.benchmarks.stream_summary import stream_cells, summarise_stream
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS
from fl_elastic_simulations.data.datasets import data_root_folder
from fl_elastic_simulations.report.document import Section, write_document
from fl_elastic_simulations.report.stream_page import shares_along, stream_sections
from fl_elastic_simulations.report.table import Grid

__all__ = ["SEEDS", "bench_stream", "write_streams_page"]

SEEDS = (0, 1, 2)
_Rows = Mapping[str, Mapping[str, Any]]


def bench_stream(
    results: Results,
    data_root: str | Path | None = None,
    *,
    tasks: Iterable[str] = (),
    methods: Iterable[str] = (),
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
    tasks, methods : iterable of str
        Names in `TASKS` and `METHODS`; all that fit if none is given.
    seeds : iterable of int
        Of streams, first weights and batches.
    workers : int
        Cells at a time, each on one core.
    tell : callable
        Hears of each finished cell.

    Raises
    ------
    ScenarioError
        If a task or method is unknown.
    """
    root = str(data_root_folder(data_root))
    names = chosen_tasks(tasks, TASKS)
    wanted = chosen_tasks(methods, METHODS, what="method")
    cells = {
        f"{name} | {method} | {seed}": (name, method, seed, root)
        for name in names
        for seed in seeds
        for method in wanted
        if TASKS[name].has(METHODS[method].read)
    }
    try:
        add_missing(
            results, run_stream, cells, workers, tell,
            lambda r: f"{r.get('average', r['prequential']):.3f}, {r['adapting_seconds']:.1f} s of adapting",
        )  # fmt: skip
    finally:
        # Also where it was interrupted: what is there is worth a table.
        for name in names:
            for method, row in summarise_stream(results.rows, name).items():
                results.add(f"summary {name} | {method}", row)
        if results.rows:
            write_streams_page(
                results.rows, results.measured_with(), results.path.with_suffix(".html")
            )


def write_streams_page(rows: _Rows, environment: Mapping[str, Any], path: Path) -> Path:
    """Write the page; streams without a finished cell are left out."""
    sections = [_section(rows, task) for task in TASKS if _summaries(rows, task)]
    for task in TASKS:
        for name, row in rows.items():
            if name.startswith(f"{task} | ") and "stream" in row:
                whose = f"{TASKS[task].title}, {name.split(' | ')[1]}: "
                sections += stream_sections(row["stream"], f"stream-{len(sections)}", whose)
    title = "Streams that change: every way through them"
    return write_document(path, "streams", title=title, sections=sections, facts=environment)


def _summaries(rows: _Rows, task: str) -> dict[str, Mapping[str, Any]]:
    return {m: rows[name] for m in METHODS if (name := f"summary {task} | {m}") in rows}


def _section(rows: _Rows, task: str) -> Section:
    found = {method: stream_cells(row) for method, row in _summaries(rows, task).items()}
    curves = {method: _mean_curve(rows, task, method) for method in found}
    starts = next(row["starts"] for name, row in rows.items() if name.startswith(f"{task} | "))
    return Section(
        task,
        TASKS[task].title,
        "Accuracy along the stream, the mean of the seeds. Dashed: changes.",
        shares_along(curves, starts[1:]),
        list(found),
        Grid(
            ("Method", *next(iter(found.values()))),
            tuple((method, *cells.values()) for method, cells in found.items()),
        ),
        dots=True,
    )


def _mean_curve(rows: _Rows, task: str, method: str) -> list[tuple[float, float]]:
    curves = [
        row["curve"] for name, row in rows.items() if name.startswith(f"{task} | {method} | ")
    ]
    grid = [float(at) for at, _ in min(curves, key=len)]
    drawn = [np.interp(grid, *np.array(curve, np.float64).T) for curve in curves]
    means = np.mean(np.stack(drawn), axis=0)
    return list(zip(grid, means.tolist(), strict=True))
