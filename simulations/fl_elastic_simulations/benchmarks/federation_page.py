"""The table of the federation benchmark as Markdown and as one page with its curves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic_simulations.benchmarks.federation_methods import OURS, REFERENCE
from fl_elastic_simulations.benchmarks.federation_summary import (
    Curve,
    cells_of,
    sooner_than,
    summarise_task,
)
from fl_elastic_simulations.benchmarks.federation_tasks import (
    CONVERGED,
    SEEDS,
    TASKS,
    FederationTask,
    methods_of,
)
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
    "charged_markdown",
    "converged_markdown",
    "federation_markdown",
    "federation_table",
    "filled",
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
Tasks = Mapping[str, FederationTask]
_NONE_YET = "No cell of this table is measured yet."


def federation_table(rows: _Rows, task: str, among: Tasks = TASKS) -> list[tuple[str, ...]]:
    """Return the cells of a task's table under `HEADINGS`."""
    table: list[tuple[str, ...]] = []
    for method, row in summarise_task(rows, task, list(among[task].methods)).items():
        reached = f" ({row['reached']} of {row['seeds']})" if row["reached"] < row["seeds"] else ""
        table.append(
            (
                method,
                str(row["seeds"]),
                _percent(row["accuracy"], row["interval"]),
                _points(row["against_reference"], row["against_interval"]),
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


def federation_markdown(rows: _Rows, among: Tasks = TASKS) -> list[str]:
    """Return the lines of one Markdown table of all methods in these tasks.

    Final accuracy in %, with the 95 % interval where there are several seeds, and in brackets how many times
    sooner, with how many times fewer bytes sent, and with how many times fewer bytes sent and received the method
    reaches the accuracy of waiting; with how many seeds, if not all. A cell without all of its seeds says so.
    """
    return _markdown(rows, among, _short)


def charged_markdown(rows: _Rows, among: Tasks = TASKS) -> list[str]:
    """Return the lines of a Markdown table of what choosing and cost profiles take.

    Simulated seconds of all clients together, mean over seeds, and in brackets their share of all clients' time.
    """
    return _markdown(rows, among, _charged)


def converged_markdown(rows: _Rows, among: Tasks) -> list[str]:
    """Return the lines of a Markdown table: how much sooner these methods are where plain ones end at last.

    A column is a plain method that was run until it had converged; a cell says how many times sooner a method
    reaches its final accuracy, and with how many times fewer bytes in both directions.
    """
    columns = [
        (task.costs, f"{task.title}, {method}: {_percent(_mean_final(reference), None)}", reference)
        for name, task in CONVERGED.items()
        for method, reference in cells_of(rows, name).items()
    ]
    if not columns:
        return [_NONE_YET]
    heads = " | ".join(title for _, title, _ in columns)
    lines = [f"| method | {heads} |", "| --- |" + " --- |" * len(columns)]
    for method in methods_of(among):
        cells = [
            _sooner(cells_of(rows, task).get(method, {}), reference)
            for task, _, reference in columns
        ]
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def _mean_final(cells: Mapping[int, Mapping[str, Any]]) -> float:
    return float(np.mean([each["final_accuracy"] for each in cells.values()]))


def _sooner(
    cells: Mapping[int, Mapping[str, Any]], reference: Mapping[int, Mapping[str, Any]]
) -> str:
    found = sooner_than(cells, reference)
    if found is None:
        return ""
    seeds, reached, times, both = found
    some = "" if reached == seeds else f" in {reached} of {seeds}"
    return f"{times:.1f}x, {both:.1f}x{some}" if reached else "never"


def _markdown(rows: _Rows, among: Tasks, cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
    found = {name: summarise_task(rows, name, list(task.methods)) for name, task in among.items()}
    shown = [task for task in among if found[task]]
    if not shown:
        return [_NONE_YET]
    titles = " | ".join(among[task].title for task in shown)
    lines = [f"| method | {titles} |", "| --- |" + " --- |" * len(shown)]
    for method in methods_of(among):
        cells = [cell(found[task][method]) if method in found[task] else "" for task in shown]
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def _short(row: Mapping[str, Any]) -> str:
    interval = row["interval"]
    around = "" if interval is None else f" \N{PLUS-MINUS SIGN} {100 * interval:.1f}"
    if row["time_ratio"] is None:
        ratios = "never"
    else:
        some = f" in {row['reached']} of {row['seeds']}" if row["reached"] < row["seeds"] else ""
        factors = (row["time_ratio"], row["uplink_ratio"], row["bytes_ratio"])
        ratios = ", ".join(f"{factor:.1f}x" for factor in factors) + some
    seeds = "" if row["seeds"] == len(SEEDS) else f" [{row['seeds']} of {len(SEEDS)} seeds]"
    return f"{100 * row['accuracy']:.1f}{around} ({ratios}){seeds}"


def _charged(row: Mapping[str, Any]) -> str:
    if not row["choosing_seconds"] and not row["profile_seconds"]:
        return "none"
    return ", ".join(
        f"{row[f'{name}_seconds']:.3g} s ({100 * row[f'{name}_share']:.1f} %)"
        for name in ("choosing", "profile")
    )


def filled(text: str, rows: _Rows, mark: str = "federation", among: Tasks = TASKS) -> str:
    r"""Return a document with the tables of these rows between its marks.

    A mark is ``<!-- federation accuracy -->``, ``<!-- federation charges -->`` or ``<!-- federation converged -->``
    (or another word in place of federation, for another benchmark's rows), and the table ends with
    ``<!-- end -->``.

    >>> filled("<!-- federation accuracy -->\nold\n<!-- end -->", {}).splitlines()[1]
    'No cell of this table is measured yet.'
    """
    tables = {
        "accuracy": federation_markdown,
        "charges": charged_markdown,
        "converged": converged_markdown,
    }

    def table(found: re.Match[str]) -> str:
        lines = tables[found[2]](rows, among)
        return "\n".join([found[1], *lines, found[3]])

    marked = rf"(<!-- {mark} (accuracy|charges|converged) -->)\n.*?(<!-- end -->)"
    return re.sub(marked, table, text, flags=re.DOTALL)


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


def _percent(value: float, interval: float | None) -> str:
    around = "" if interval is None else f" \N{PLUS-MINUS SIGN} {100 * interval:.1f}"
    return f"{100 * value:.1f}{around} %"


def _points(value: float, interval: float | None) -> str:
    """Return a difference of accuracies in points, with its interval.

    >>> _points(0.012, 0.003), _points(-0.5, None)
    ('+1.2 ± 0.3', '-50.0')
    """
    around = "" if interval is None else f" \N{PLUS-MINUS SIGN} {100 * interval:.1f}"
    return f"{100 * value:+.1f}{around}"


def _ratio(value: float | None, note: str) -> str:
    return MISSING if value is None else f"{value:.2g}{TIMES}{note}"
