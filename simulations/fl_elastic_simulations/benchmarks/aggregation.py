"""What merging costs a server: CPU time and peak memory, beside Flower's FedAvg."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows
from fl_elastic_simulations.engine.merging_cost import (
    FLOWER,
    MERGED,
    MOST_KEPT,
    NUMPY,
    WRITTEN,
    merging_cost,
    tensors_cost,
)

__all__ = ["BENCHMARK", "Aggregation"]

_REPLIES = (10, 100, 1000)
_REPEATS = 3
_TENSORS = (20, 200)
_TURNS = 5


class Aggregation(Benchmark):
    """CPU seconds and memory of merging replies of a MobileNetV2, each run in a process of its own.

    Seconds are CPU time of one aggregation. Peak memory is the process's largest resident set over what it had
    before the first reply, in models of 14 MB. Flower gives its FedAvg all replies at once, so it is handed up
    to a hundred different ones; for a thousand the replies share their bytes and only the time counts.
    Further rows tell what the number of tensors and the codec change, for a hundred replies of 10 MB.
    """

    name = "aggregation"
    fresh_process = True

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return the kinds of replies, in turn, several times where that does not take long."""
        cases: dict[str, tuple[Any, ...]] = {
            f"{kind} | {replies} | {turn}": (kind, replies)
            for replies in _REPLIES
            for turn in range(_REPEATS if replies <= MOST_KEPT else 1)
            for kind in MERGED
        }
        for tensors in _TENSORS:
            for turn in range(_TURNS):
                for kind in (FLOWER, *NUMPY, *WRITTEN):
                    cases[_name(kind, tensors, turn)] = (kind, MOST_KEPT, tensors)
        return cases

    def run(self, kind: str, replies: int, tensors: int | None = None) -> Row:
        """Merge so many replies of one kind: of a MobileNetV2, or of a model of so many tensors."""
        if tensors is not None:
            return dict(tensors_cost(kind, tensors, replies))
        row: Row = dict(merging_cost(kind, replies))
        if kind == FLOWER and replies > MOST_KEPT:
            del row["peak_models"]
        return row

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return milliseconds for a reply, and in brackets the peak in models: medians over the turns.

        By the number of tensors brackets hold the time over Flower's of the same turn.
        """
        table = pd.DataFrame(
            {
                kind: {f"{replies:,}": _text(rows, kind, replies) for replies in _REPLIES}
                for kind in MERGED
            }
        )
        few = pd.DataFrame({f"{tensors}": _by_codec(rows, tensors) for tensors in _TENSORS}).T
        return {"costs": table.rename_axis("replies"), "tensors": few.rename_axis("tensors")}


def _name(kind: str, tensors: int, turn: int) -> str:
    return f"{tensors} tensors | {kind} | {turn}"


def _by_codec(rows: Rows, tensors: int) -> dict[str, str]:
    turns = [turn for turn in range(_TURNS) if _name(FLOWER, tensors, turn) in rows]
    flowers = [rows[_name(FLOWER, tensors, turn)] for turn in turns]
    cells = {
        FLOWER: _milliseconds(row["seconds_per_reply"] for row in flowers),
        "freeing its replies": _milliseconds(row["freed_seconds_per_reply"] for row in flowers),
    }
    for kind in (*NUMPY, *WRITTEN):
        pairs = [
            (rows[name]["seconds_per_reply"], flower["seconds_per_reply"])
            for turn, flower in zip(turns, flowers, strict=True)
            if (name := _name(kind, tensors, turn)) in rows
        ]
        times = f" ({statistics.median(a / b for a, b in pairs):.2f})" if pairs else ""
        cells[kind] = _milliseconds(ours for ours, _ in pairs) + times
    return cells


def _milliseconds(seconds: Iterable[float]) -> str:
    found = [*seconds]
    return f"{1e3 * statistics.median(found):.1f} ms" if found else ""


def _text(rows: Rows, kind: str, replies: int) -> str:
    found = [row for name, row in rows.items() if name.startswith(f"{kind} | {replies} | ")]
    if not found:
        return ""
    milliseconds = _milliseconds(row["seconds_per_reply"] for row in found)
    peaks = [row["peak_models"] for row in found if "peak_models" in row]
    peak = f" ({statistics.median(peaks):.0f})" if peaks else ""
    return f"{milliseconds}{peak}"


BENCHMARK = Aggregation()
