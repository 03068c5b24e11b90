"""The table of the federation benchmark as one page with its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic_simulations.benchmarks.federation_methods import OURS, REFERENCE
from fl_elastic_simulations.benchmarks.federation_summary import Curve, summarise_task
from fl_elastic_simulations.benchmarks.federation_tables import (
    Tasks,
    accuracy_with_interval,
    points_with_interval,
)
from fl_elastic_simulations.benchmarks.federation_tasks import TASKS
from fl_elastic_simulations.report.document import (
    Figure,
    Section,
    drawn_text,
    figure,
    write_document,
)
from fl_elastic_simulations.report.formats import MISSING, TIMES, bytes_text
from fl_elastic_simulations.report.palette import Ink, ink
from fl_elastic_simulations.report.table import Grid

__all__ = [
    "HIGHLIGHTED",
    "federation_table",
    "write_federation_page",
]

HEADINGS = (
    "Method",
    "Seeds",
    "Final accuracy",
    "Against waiting",
    "Time to its accuracy",
    "Uplink to it",
    "Up and down to it",
    "Rounds",
    "Uplink in total",
    "Downlink in total",
    "Stayed out",
    "Choosing",
    "Cost profiles",
    "Least coverage",
)
HIGHLIGHTED = (
    REFERENCE, OURS, "fewer full steps, our server", "fedel", "timelyfl, our server", "heterofl",
    "fewer full steps, solved head", "fixed cut, trained head", "fixed cut, solved head",
    "fl_elastic, fixed cut, solved head",
)  # fmt: skip
_FAINT = Ink("#8592a0", "solid").faint(0.35)
_TIMES = 120
_Rows = Mapping[str, Mapping[str, Any]]


def federation_table(rows: _Rows, task: str, among: Tasks = TASKS) -> list[tuple[str, ...]]:
    """Return the cells of a task's table under `HEADINGS`."""
    table: list[tuple[str, ...]] = []
    for method, row in summarise_task(rows, task, list(among[task].methods)).items():
        reached = f" ({row['reached']} of {row['seeds']})" if row["reached"] < row["seeds"] else ""
        table.append(
            (
                method,
                str(row["seeds"]),
                accuracy_with_interval(row["accuracy"], row["interval"]),
                points_with_interval(row["against_reference"], row["against_interval"]),
                _ratio(row["time_ratio"], reached),
                _ratio(row["uplink_ratio"], ""),
                _ratio(row["bytes_ratio"], ""),
                f"{row['rounds']:.0f}",
                bytes_text(row["uplink_bytes"]),
                bytes_text(row["downlink_bytes"]),
                f"{row['rejected']:.0f}",
                f"{100 * row['choosing_share']:.1f} %",
                f"{100 * row['profile_share']:.1f} %",
                f"{min(row['least_coverage'].values(), default=0.0):.2f}",
            )
        )
    return table


def write_federation_page(
    rows: _Rows, environment: Mapping[str, Any], path: Path, among: Tasks = TASKS
) -> Path:
    """Write the page; tasks without a finished cell are left out."""
    return write_document(
        path, "federation", title="Unequal clients: every method in the same fleets",
        sections=[
            _section(rows, name, among) for name in among if federation_table(rows, name, among)
        ],
        facts=environment, times=TIMES, missing=MISSING,
    )  # fmt: skip


def _section(rows: _Rows, task: str, among: Tasks) -> Section:
    found = {
        method: curves
        for method in among[task].methods
        if (curves := _curves(rows, f"{task} | {method} | "))
    }
    shown = [method for method in HIGHLIGHTED if method in found]
    return Section(
        task,
        among[task].title,
        "Accuracy against simulated time, the mean of the seeds. Methods without a name here are faint.",
        _chart(found, shown),
        shown,
        Grid(HEADINGS, tuple(federation_table(rows, task, among))),
    )


def _curves(rows: _Rows, prefix: str) -> list[Curve]:
    found = (row["curve"] for name, row in rows.items() if name.startswith(prefix))
    return [curve for curve in found if len(curve) > 1]


def _chart(curves: Mapping[str, Sequence[Curve]], shown: Sequence[str]) -> Figure:
    """Return accuracy against simulated time, a line per method; those not shown in colour lie below."""
    end = max(curve[-1][0] for seeds in curves.values() for curve in seeds)
    grid = np.linspace(0.0, end, _TIMES)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": drawn_text(name),
            "legendgroup": str(shown.index(name)) if name in shown else "",
            "x": grid.tolist(),
            "y": _mean(curves[name], grid).round(4).tolist(),
            "line": {
                "color": ink(shown.index(name)).colour if name in shown else _FAINT,
                "width": 2.4 if name in shown else 1.2,
            },
            "hovertemplate": "%{y:.1%} after %{x:.3~g} s",
        }
        for name in [*(other for other in curves if other not in shown), *shown]
    ]
    return figure(
        traces, 360,
        xaxis={"title": {"text": "simulated time (s)"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "accuracy"}, "tickformat": ".0%", "rangemode": "tozero"},
    )  # fmt: skip


def _mean(seeds: Sequence[Curve], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean accuracy over seeds at each time."""
    rows = [
        np.interp(grid, [row[0] for row in curve], [row[-1] for row in curve]) for curve in seeds
    ]
    return np.asarray(np.mean(rows, axis=0))


def _ratio(value: float | None, note: str) -> str:
    return MISSING if value is None else f"{value:.2g}{TIMES}{note}"
