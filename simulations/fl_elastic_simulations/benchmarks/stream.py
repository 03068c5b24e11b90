"""Compare methods on streams that change: accuracy, forgetting, recovery, seconds, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fl_elastic_simulations.benchmarks.benchmark import (
    Benchmark,
    Request,
    Row,
    Rows,
    chosen_tasks,
)
from fl_elastic_simulations.benchmarks.federation import cells_of
from fl_elastic_simulations.benchmarks.intervals import mean_text
from fl_elastic_simulations.benchmarks.stream_cell import run_stream
from fl_elastic_simulations.benchmarks.stream_methods import METHODS, REFERENCE
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS
from fl_elastic_simulations.report.formats import MISSING, bytes_text


class Streams(Benchmark):
    """Accuracy, forgetting, recovery, seconds and memory of methods that learn from streams that change."""

    name = "stream"
    takes = ("tasks", "methods", "seeds")

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return every method on every stream that it suits, with every seed."""
        wanted = chosen_tasks(request.methods, METHODS, what="method")
        return {
            f"{name} | {method} | {seed}": (name, method, seed, request.data_root)
            for name in chosen_tasks(request.tasks, TASKS)
            for seed in request.seeds or self.seeds
            for method in wanted
            if TASKS[name].has(METHODS[method].read)
        }

    def run(self, task: str, method: str, seed: int, data_root: str) -> Row:
        """Run one device through one stream."""
        return run_stream(task, method, seed, data_root)

    def summary(self, row: Mapping[str, Any]) -> str:
        """Return accuracy and seconds of adapting."""
        return f"{_score(row):.3f}, {row['adapting_seconds']:.1f} s of adapting"

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return a table for each stream, with means over the seeds that both a method and full replay have.

        Columns are accuracy in % with its 95 % interval, the difference to full replay in points, CPU seconds of
        adapting, peak memory above that before the stream, and bytes of the store's files.
        """
        found = {}
        for name, task in TASKS.items():
            reference = cells_of(rows, name, REFERENCE)
            lines = {}
            for method in METHODS:
                own = cells_of(rows, name, method)
                seeds = sorted(set(own) & set(reference))
                if not seeds:
                    continue
                scores = [_score(own[seed]) for seed in seeds]
                against = [_score(own[seed]) - _score(reference[seed]) for seed in seeds]
                means = pd.DataFrame([own[seed] for seed in seeds]).mean(numeric_only=True)
                lines[method] = {
                    "accuracy, %": mean_text(scores),
                    "against": mean_text(against, sign=True).removesuffix(" ± 0.0"),
                    "forgetting": _number(means, "forgetting", 100, 1),
                    "recovery": _number(means, "recovery", 1, 0),
                    "adapting, s": _number(means, "adapting_seconds", 1, 1),
                    "memory": bytes_text(means["peak_bytes"]),
                    "store": bytes_text(means["store_bytes"]),
                }
            found[name] = pd.DataFrame.from_dict(lines, orient="index").rename_axis(task.title)
        return found


def _score(row: Mapping[str, Any]) -> float:
    """Return the accuracy to compare: the mean over all tasks at the end, or else the one along the stream."""
    return float(row.get("average", row["prequential"]))


def _number(means: pd.Series[float], name: str, factor: float, digits: int) -> str:
    value = means.get(name, np.nan)
    return MISSING if np.isnan(value) else f"{factor * value:.{digits}f}"


BENCHMARK = Streams()
