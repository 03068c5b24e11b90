"""What merging costs a server: CPU time and peak memory, beside Flower's FedAvg."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows
from fl_elastic_simulations.engine.merging_cost import MERGED, MOST_KEPT, merging_cost

__all__ = ["BENCHMARK", "Aggregation"]

_REPLIES = (10, 100, 1000)
_REPEATS = 3


class Aggregation(Benchmark):
    """CPU seconds and memory of merging replies of a MobileNetV2, each run in a process of its own.

    Seconds are CPU time of one aggregation. Peak memory is the process's largest resident set over what it had
    before the first reply, in models of 14 MB. Flower gives its FedAvg all replies at once, so it is handed up
    to a hundred different ones; for a thousand the replies share their bytes and only the time counts.
    """

    name = "aggregation"
    fresh_process = True

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return the kinds of replies, in turn, several times where that does not take long."""
        return {
            f"{kind} | {replies} | {turn}": (kind, replies)
            for replies in _REPLIES
            for turn in range(_REPEATS if replies <= MOST_KEPT else 1)
            for kind in MERGED
        }

    def run(self, kind: str, replies: int) -> Row:
        """Merge so many replies of one kind."""
        row: Row = dict(merging_cost(kind, replies))
        if kind == MERGED[0] and replies > MOST_KEPT:
            del row["peak_models"]
        return row

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return milliseconds for a reply, and in brackets the peak in models: medians over the turns."""
        table = pd.DataFrame(
            {
                kind: {f"{replies:,}": _text(rows, kind, replies) for replies in _REPLIES}
                for kind in MERGED
            }
        )
        return {"costs": table.rename_axis("replies")}


def _text(rows: Rows, kind: str, replies: int) -> str:
    found = [row for name, row in rows.items() if name.startswith(f"{kind} | {replies} | ")]
    if not found:
        return ""
    milliseconds = 1e3 * statistics.median(row["seconds_per_reply"] for row in found)
    peaks = [row["peak_models"] for row in found if "peak_models" in row]
    peak = f" ({statistics.median(peaks):.0f})" if peaks else ""
    return f"{milliseconds:.1f} ms{peak}"


BENCHMARK = Aggregation()
