"""What each part of our method contributes, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fl_elastic.bench.federation_methods import ABLATED, ABLATIONS
from fl_elastic.bench.federation_page import points_text
from fl_elastic.bench.federation_summary import interval

__all__ = ["ablation_markdown"]

_Rows = Mapping[str, Mapping[str, Any]]


def ablation_markdown(rows: _Rows, task: str) -> list[str]:
    """Return the lines of a Markdown table: what was changed, final accuracy, and how much better or worse that is.

    The difference to `ABLATED` is taken within each seed, for seeds differ by more than methods do; it is in
    points, with its 95 % interval. Time and bytes to the accuracy of waiting are as in the table of all methods.
    """
    lines = [
        "| changed | accuracy, % | against none | sooner | fewer bytes |",
        "| --- |" + " --- |" * 4,
    ]
    base = _finals(rows, task, ABLATED)
    for method in ABLATIONS:
        summary, finals = rows.get(f"summary {task} | {method}"), _finals(rows, task, method)
        against = [final - base[seed] for seed, final in finals.items() if seed in base]
        if summary is None or not against:
            continue
        cells = [
            "none" if method == ABLATED else method,
            f"{100 * summary['accuracy']:.1f}",
            "" if method == ABLATED else points_text(statistics.fmean(against), interval(against)),
            _times(summary["time_ratio"]),
            _times(summary["uplink_ratio"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _finals(rows: _Rows, task: str, method: str) -> dict[str, float]:
    """Return the final accuracy by seed."""
    start = f"{task} | {method} | "
    return {
        name.removeprefix(start): row["final_accuracy"]
        for name, row in rows.items()
        if name.startswith(start)
    }


def _times(ratio: float | None) -> str:
    return "never" if ratio is None else f"{ratio:.1f}x"
