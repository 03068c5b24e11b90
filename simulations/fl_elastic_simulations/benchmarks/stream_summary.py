"""From the cells of a stream to its table: means over seeds, and each method against full replay."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fl_elastic_simulations.benchmarks.federation_summary import interval
from fl_elastic_simulations.benchmarks.stream_methods import METHODS, REFERENCE
from fl_elastic_simulations.benchmarks.stream_tasks import TASKS
from fl_elastic_simulations.report.formats import MISSING, bytes_text

__all__ = ["score_name", "stream_cells", "stream_markdown", "summarise_stream"]

_Rows = Mapping[str, Mapping[str, Any]]
_IN_SHORT = (
    "Accuracy, %", "Against", "Forgetting", "Recovery", "Adapting, s", "Memory", "Store",
)  # fmt: skip
_MEANS = (
    "average", "anytime", "forgetting", "backward_transfer", "forward_transfer", "prequential",
    "delay", "false_alarms", "recovery", "adapting_seconds", "other_seconds", "peak_bytes",
    "store_bytes", "stored", "trained_share", "undone",
)  # fmt: skip


def score_name(cell: Mapping[str, Any]) -> str:
    """Return which accuracy counts: the mean over all tasks at the end, or the one along the stream."""
    return "average" if "average" in cell else "prequential"


def summarise_stream(rows: _Rows, task: str) -> dict[str, dict[str, Any]]:
    """Return a row per method over the seeds for which it and full replay were run."""
    cells = {
        method: {
            int(name.rpartition(" | ")[2]): row
            for name, row in rows.items()
            if name.startswith(f"{task} | {method} | ")
        }
        for method in METHODS
    }
    reference = cells[REFERENCE]
    return {
        method: _summary(own, reference)
        for method, own in cells.items()
        if set(own) & set(reference)
    }


def _summary(
    cells: Mapping[int, Mapping[str, Any]], reference: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    seeds = sorted(set(cells) & set(reference))
    score = score_name(reference[seeds[0]])
    scores = [cells[seed][score] for seed in seeds]
    against = [cells[seed][score] - reference[seed][score] for seed in seeds]
    found = {"seeds": len(seeds), "score": statistics.fmean(scores), "interval": interval(scores)}
    found |= {
        "against_reference": statistics.fmean(against),
        "against_interval": interval(against),
    }
    for name in _MEANS:
        values = [cells[seed].get(name) for seed in seeds]
        known = [value for value in values if value is not None]
        found[name] = statistics.fmean(known) if known else None
    for name in ("adapting_seconds", "store_bytes"):
        whole = sum(reference[seed][name] for seed in seeds)
        found[f"{name}_ratio"] = sum(cells[seed][name] for seed in seeds) / whole
    return found


def stream_markdown(rows: _Rows, task: str) -> list[str]:
    """Return the lines of a task's table in Markdown.

    Accuracy in % with its 95 % interval (Student's t over seeds), the difference to full replay in points, CPU
    seconds of adapting, peak of memory above that before the stream, bytes of the store's files.
    """
    found = {
        method: stream_cells(rows[name])
        for method in METHODS
        if (name := f"summary {task} | {method}") in rows
    }
    lines = [
        f"| {TASKS[task].title} | {' | '.join(each.lower() for each in _IN_SHORT)} |",
        "| --- |" + " --- |" * len(_IN_SHORT),
    ]
    for method, cells in found.items():
        lines.append(f"| {method} | {' | '.join(cells[each] for each in _IN_SHORT)} |")
    return lines


def stream_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a method's figures as text, by heading."""
    return {
        "Accuracy, %": f"{100 * row['score']:.1f}{_around(row['interval'])}",
        "Against": f"{100 * row['against_reference']:+.1f}{_around(row['against_interval'])}",
        "Anytime, %": _percent(row["anytime"]),
        "Forgetting": _percent(row["forgetting"]),
        "Backward transfer": _percent(row["backward_transfer"]),
        "Forward transfer": _percent(row["forward_transfer"]),
        "Along the stream, %": _percent(row["prequential"]),
        "Delay of alarms": _count(row["delay"]),
        "False alarms": MISSING if row["false_alarms"] is None else f"{row['false_alarms']:.1f}",
        "Recovery": _count(row["recovery"]),
        "Adapting, s": f"{row['adapting_seconds']:.1f}",
        "Memory": bytes_text(row["peak_bytes"]),
        "Store": bytes_text(row["store_bytes"]),
    }


def _around(half: float | None) -> str:
    return f" \N{PLUS-MINUS SIGN} {100 * half:.1f}" if half else ""


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}"


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}"
