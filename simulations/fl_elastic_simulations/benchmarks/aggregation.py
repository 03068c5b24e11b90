"""Measure what merging updates costs a server, in CPU time and peak memory, beside Flower's FedAvg."""

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

_REPLIES = (10, 100, 1000)
_REPEATS = 3
_TENSORS = (20, 200)
_TURNS = 5


class Aggregation(Benchmark):
    """CPU seconds and memory of merging replies of a MobileNetV2, with each run in a process of its own.

    Seconds are the CPU time of one aggregation. Peak memory is the largest resident set of the process minus the
    resident set before the first reply, in models of 14 MB. Flower gives its FedAvg all replies at once, so FedAvg
    gets up to a hundred different replies. A thousand replies share their bytes, so only their time counts.
    Further rows show the effect of the number of tensors and of the codec, for a hundred replies of 10 MB.
    """

    name = "aggregation"
    fresh_process = True

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return every kind of replies in turn, with repetitions if the replies are few."""
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
        """Merge ``replies`` replies of one kind, of a MobileNetV2 or of a model with ``tensors`` tensors."""
        if tensors is not None:
            return dict(tensors_cost(kind, tensors, replies))
        row: Row = dict(merging_cost(kind, replies))
        if kind == FLOWER and replies > MOST_KEPT:
            del row["peak_models"]
        return row

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return the table of costs and the table by number of tensors, both with medians over the turns.

        The first gives milliseconds per reply and, in brackets, the peak in models. The second gives milliseconds
        and, in brackets, the ratio to Flower's time in the same turn.
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
