"""Ways to go through streams that change: accuracy, forgetting, recovery, seconds, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fl_elastic.environment import environment
from fl_elastic.storage import write_atomically
from fl_elastic_simulations.benchmarks.cells import chosen_tasks, finished_cells
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.stream_cell import run_stream
from fl_elastic_simulations.benchmarks.stream_methods import METHODS
from fl_elastic_simulations.benchmarks.stream_summary import stream_cells, summarise_stream
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS
from fl_elastic_simulations.data.datasets import data_root_folder
from fl_elastic_simulations.report.drawing import legend, lines
from fl_elastic_simulations.report.static_page import static_page
from fl_elastic_simulations.report.stream_page import stream_sections

__all__ = ["SEEDS", "bench_stream", "write_streams_page"]

SEEDS = (0, 1, 2)
_Rows = Mapping[str, Mapping[str, Any]]
_INTRO = (
    "<p>Each method meets the same streams with the same model. <strong>Accuracy</strong> is the mean over all "
    "tasks of a stream at its end, or of all predictions along a stream that is its only test; "
    "<strong>against</strong> is the difference to full training with replay, in points. Anytime accuracy, "
    "forgetting (Chaudhry), backward and forward transfer as in the literature. Recovery: samples until 95 % of "
    "the accuracy before a change, a change never got over counting to its end. Seconds are CPU seconds of one "
    "thread; memory is the peak above that before the stream. Intervals are 95 %, by Student's t over seeds.</p>"
)


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


def write_streams_page(rows: _Rows, environment: Mapping[str, Any], path: Path) -> Path:
    """Write the page; streams without a finished cell are left out."""
    sections = [_section(rows, task) for task in TASKS if _summaries(rows, task)]
    for task in TASKS:
        for name, row in rows.items():
            if name.startswith(f"{task} | ") and "stream" in row:
                title = f"{TASKS[task].title}: {name.split(' | ')[1]}"
                sections += [f"<h2>{escape(title)}</h2>", *stream_sections(row["stream"])]
    title = "Streams that change: every way through them"
    return write_atomically(path, static_page(title, _INTRO, sections, environment).encode())


def _summaries(rows: _Rows, task: str) -> dict[str, Mapping[str, Any]]:
    return {m: rows[name] for m in METHODS if (name := f"summary {task} | {m}") in rows}


def _section(rows: _Rows, task: str) -> str:
    found = _summaries(rows, task)
    heads = list(next(iter(stream_cells(row) for row in found.values())))
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in ("Method", *heads))
    body = "".join(
        f'<tr><th scope="row">{escape(method)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in stream_cells(row).values())
        + "</tr>"
        for method, row in found.items()
    )
    curves = {method: _mean_curve(rows, task, method) for method in found}
    starts = next(row["starts"] for name, row in rows.items() if name.startswith(f"{task} | "))
    end = max(at for curve in curves.values() for at, _ in curve)
    return "\n".join(
        [
            f'<section><h2>{escape(TASKS[task].title)}</h2><div class="scroll"><table>',
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
            lines(curves, end, marks=starts[1:], label="accuracy along the stream"),
            legend(list(curves)),
            '<p class="guide">Accuracy along the stream, the mean of the seeds. Dashed: changes.</p></section>',
        ]
    )


def _mean_curve(rows: _Rows, task: str, method: str) -> list[tuple[float, float]]:
    curves = [
        row["curve"] for name, row in rows.items() if name.startswith(f"{task} | {method} | ")
    ]
    grid = [float(at) for at, _ in min(curves, key=len)]
    drawn = [np.interp(grid, *np.array(curve, np.float64).T) for curve in curves]
    means = np.mean(np.stack(drawn), axis=0)
    return list(zip(grid, means.tolist(), strict=True))
