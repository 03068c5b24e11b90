"""The table of the federation benchmark as one page that needs neither script nor network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fl_elastic.bench.federation_curves import chart
from fl_elastic.bench.federation_methods import ABLATIONS, METHODS, OURS, REFERENCE, SPARSE
from fl_elastic.bench.federation_summary import Curve
from fl_elastic.bench.federation_tasks import TASKS
from fl_elastic.report.formats import MISSING, TIMES, bytes_text
from fl_elastic.report.static_page import static_page
from fl_elastic.storage import write_atomically

__all__ = ["federation_markdown", "federation_table", "points_text", "write_federation_page"]

HEADINGS = (
    "Method",
    "Seeds",
    "Final accuracy",
    "Against waiting",
    "Time to its accuracy",
    "Uplink to it",
    "Rounds",
    "Uplink in total",
    "Least coverage",
)
_HIGHLIGHTED = (REFERENCE, OURS, SPARSE, "fewer full steps", "fedel", "fedavg, dropping")
_INTRO = (
    "<p>All methods of a task get the same simulated time: measured costs of the host times the device's "
    "slowdown, and bytes by bandwidth. <strong>Time</strong> and <strong>uplink</strong> are those that FedAvg "
    "waiting for its slowest client needs to its own final accuracy, over the method's to the same: "
    f"3{TIMES} is a third of the time. {MISSING} means never. Intervals are 95 %, by Student's t over "
    "seeds.</p>"
)
_Rows = Mapping[str, Mapping[str, Any]]


def federation_table(rows: _Rows, task: str) -> list[tuple[str, ...]]:
    """Return the cells of a task's table under `HEADINGS`, methods first and ablations after them."""
    table: list[tuple[str, ...]] = []
    for method in [*METHODS, *ABLATIONS]:
        row = rows.get(f"summary {task} | {method}")
        if row is None:
            continue
        reached = f" ({row['reached']} of {row['seeds']})" if row["reached"] < row["seeds"] else ""
        table.append(
            (
                method,
                str(row["seeds"]),
                _percent(row["accuracy"], row["interval"]),
                points_text(row["against_reference"], row["against_interval"]),
                _ratio(row["time_ratio"], reached),
                _ratio(row["uplink_ratio"], ""),
                f"{row['rounds']:.0f}",
                bytes_text(row["uplink_bytes"]),
                f"{min(row['least_coverage'].values(), default=0.0):.2f}",
            )
        )
    return table


def federation_markdown(
    rows: _Rows, tasks: Sequence[str], methods: Iterable[str] = METHODS
) -> list[str]:
    """Return the lines of one Markdown table of these methods in these tasks.

    Final accuracy in %, with the 95 % interval where there are several seeds, and in brackets how many times sooner
    and with how many times fewer bytes the method reaches the accuracy of waiting; with how many seeds, if not all.
    """
    titles = [TASKS[task].title for task in tasks]
    lines = [f"| method | {' | '.join(titles)} |", "| --- |" + " --- |" * len(tasks)]
    for method in methods:
        found = [rows.get(f"summary {task} | {method}") for task in tasks]
        cells = ["" if row is None else _short(row) for row in found]
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
        ratios = f"{row['time_ratio']:.1f}x, {row['uplink_ratio']:.1f}x{some}"
    return f"{100 * row['accuracy']:.1f}{around} ({ratios})"


def write_federation_page(rows: _Rows, environment: Mapping[str, Any], path: Path) -> Path:
    """Write the page; tasks without a finished cell are left out."""
    sections = [_section(rows, name) for name in TASKS if federation_table(rows, name)]
    title = "Unequal clients: every method in the same fleets"
    return write_atomically(path, static_page(title, _INTRO, sections, environment).encode())


def _section(rows: _Rows, task: str) -> str:
    table = federation_table(rows, task)
    body = "".join(
        "<tr>"
        + f'<th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in table
    )
    head = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    curves = {
        method: found for method in METHODS if (found := _curves(rows, f"{task} | {method} | "))
    }
    return "\n".join(
        [
            f'<section><h2>{escape(TASKS[task].title)}</h2><div class="scroll"><table>',
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
            chart(curves, _HIGHLIGHTED),
            "</section>",
        ]
    )


def _curves(rows: _Rows, prefix: str) -> list[Curve]:
    found = (row["curve"] for name, row in rows.items() if name.startswith(prefix))
    return [curve for curve in found if len(curve) > 1]


def _percent(value: float, interval: float | None) -> str:
    around = "" if interval is None else f" \N{PLUS-MINUS SIGN} {100 * interval:.1f}"
    return f"{100 * value:.1f}{around} %"


def points_text(value: float, interval: float | None) -> str:
    """Return a difference of accuracies in points, with its interval.

    >>> points_text(0.012, 0.003), points_text(-0.5, None)
    ('+1.2 ± 0.3', '-50.0')
    """
    around = "" if interval is None else f" \N{PLUS-MINUS SIGN} {100 * interval:.1f}"
    return f"{100 * value:+.1f}{around}"


def _ratio(value: float | None, note: str) -> str:
    return MISSING if value is None else f"{value:.2g}{TIMES}{note}"
