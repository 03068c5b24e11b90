"""The benchmark of `where_to_read`: at which place of a model a head in closed form reads best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Results, Row, Rows
from fl_elastic_simulations.benchmarks.where_to_read import (
    TASKS,
    bench_read,
    bench_read_peaks,
    bench_read_sizes,
    read_cell,
    read_markdown,
    read_peaks_markdown,
    read_sizes_markdown,
)

__all__ = ["BENCHMARK", "Read"]


class Read(Benchmark):
    """Accuracy and seconds of heads solved without a training step, by place read, and peaks of fresh processes."""

    name = "read"
    file = "where_to_read"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return no cases: `measure` determines them itself."""
        return {}

    def run(self, *case: Any) -> Row:
        """Solve one head."""
        return read_cell(*case)

    def measure(
        self, results: Results, request: Request, workers: int, tell: Callable[[str], None]
    ) -> None:
        """Measure every method on every task and heads of fewer features; peaks only if no tasks are named."""
        root, tasks = request.data_root, request.tasks
        seeds = request.seeds or self.seeds
        bench_read(results, root, tasks=tasks, seeds=seeds, workers=workers, tell=tell)
        bench_read_sizes(results, root, tasks=tasks, workers=workers, tell=tell)
        if not tasks:
            bench_read_peaks(results, tell)

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return a table for each task, that of fewer features, and that of peaks."""
        found = {name: _frame(read_markdown(rows, name)) for name in TASKS}
        found["sizes"] = _frame(read_sizes_markdown(rows))
        found["peaks"] = _frame(read_peaks_markdown(rows).splitlines())
        return found


def _frame(lines: list[str]) -> pd.DataFrame:
    """Return a Markdown table as one of pandas."""
    cells = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")
    ]
    if len(cells) < 3:
        return pd.DataFrame()
    table = pd.DataFrame(cells[2:], columns=cells[0]).set_index(cells[0][0])
    table.attrs["notes"] = [line for line in lines if line and not line.startswith("|")]
    return table


BENCHMARK = Read()
