"""The results table: the same headings and cells for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fl_elastic_simulations.report.formats import (
    MISSING,
    accuracy_text,
    bytes_text,
    percent_text,
    ratio_text,
    seconds_text,
    spans_text,
)
from fl_elastic_simulations.report.summary import Method, Results, read_summary

__all__ = [
    "Grid",
    "cuts_grid",
    "rejections_grid",
    "results_grid",
    "results_table",
    "target_sentence",
]


# Of an accuracy: what is above the largest class's share by no more is above it by chance.
_NO_BETTER = 0.005


@dataclass(frozen=True)
class Grid:
    """Headings and rows of plain text; the first column names the method."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def results_grid(results: Results) -> Grid:
    """Return one row per method, compared with the first method.

    The speed-up is that of the time to the target. Where the first method never reached it, there
    is nothing to divide, and the whole column compares the total time instead and says so. A method that is no
    better than the largest class's share has learned nothing: it has no speed-up, and nothing has one over it.
    """
    first = results.methods[0]
    learned = {method.name for method in results.methods} - set(_learned_nothing(results))
    to_target = first.seconds_to_target is not None
    rejected = any(method.rejected_updates for method in results.methods)
    time = "Simulated time" if results.simulated else "Time"
    headings = (
        "Method",
        "Final accuracy",
        f"{time} to target",
        f"{time} in total",
        "Speed-up to target" if to_target else "Speed-up in total",
        "Uplink",
        "Downlink",
        *(("Rejected updates",) if rejected else ()),
    )
    rows = tuple(
        (
            method.name,
            _final_accuracy(method, results),
            _target_time(method, results.target_accuracy),
            seconds_text(method.seconds),
            ratio_text(
                _speedup(first, method, to_target) if {first.name, method.name} <= learned else None
            ),
            _traffic(method.uplink_bytes, first.uplink_bytes),
            _traffic(method.downlink_bytes, first.downlink_bytes),
            *((str(method.rejected_updates),) if rejected else ()),
        )
        for method in results.methods
    )
    return Grid(headings, rows)


def cuts_grid(results: Results) -> Grid | None:
    """Return a row for each place where the fleet's cut came to lie; None where no method has one."""
    time = "Simulated time" if results.simulated else "Time"
    rows = tuple(
        (
            method.name,
            str(cut.seed),
            seconds_text(cut.seconds),
            cut.group or "everything is trained",
            _kept(method) if first else "",
        )
        for method in results.methods
        for first, cut in ((cut is method.cuts[0], cut) for cut in method.cuts)
    )
    headings = ("Method", "Seed", time, "Trained from here up", "Features found again")
    return Grid(headings, rows) if rows else None


def rejections_grid(results: Results) -> Grid | None:
    """Return a row per method and reason for which updates were left out; None where none was."""
    rows = []
    for method in results.methods:
        counts: dict[str, int] = {}
        rounds: dict[str, set[int]] = {}
        for each in method.rejections:
            counts[each.reason] = counts.get(each.reason, 0) + each.updates
            rounds.setdefault(each.reason, set()).add(each.round)
        rows += [
            (method.name, reason, str(counts[reason]), spans_text(rounds[reason]))
            for reason in sorted(counts, key=lambda reason: (-counts[reason], reason))
        ]
    return Grid(("Method", "Reason", "Updates", "Rounds"), tuple(rows)) if rows else None


def _kept(method: Method) -> str:
    met = method.features_found + method.features_computed
    return percent_text(method.features_found / met) if met else MISSING


def results_table(summary: Mapping[str, object]) -> Table:
    """Return the results of a simulation as a table for the terminal.

    Parameters
    ----------
    summary : mapping
        What ``fl-elastic simulate`` writes as ``summary.json``.

    Raises
    ------
    ElasticError
        If the summary has no method, or a part has another type than it must have.
    """
    results = read_summary(summary)
    grid = results_grid(results)
    # Text, not str: a name such as "[red]" is a name and no markup.
    table = Table(
        title=Text(results.title),
        caption=Text(target_sentence(results)),
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, heading in enumerate(grid.headings):
        table.add_column(
            Text(heading),
            justify="left" if index == 0 else "right",
            # Words of a heading are never cut, however narrow the terminal.
            min_width=max(map(len, heading.split())),
        )
    for name, *cells in grid.rows:
        table.add_row(Text(name), *(Text(_stacked(cell)) for cell in cells))
    return table


def _stacked(cell: str) -> str:
    """Put spread and percentage on a second line: seven columns then fit eighty characters."""
    return cell.replace(" (", "\n(").replace(" ±", "\n±")


def target_sentence(results: Results) -> str:
    """Say what the target is and what the percentages refer to."""
    rule = f" ({results.target_rule})" if results.target_rule else ""
    target = (
        "No target accuracy was set."
        if results.target_accuracy is None
        else f"Target: {accuracy_text(results.target_accuracy)} accuracy{rule}."
    )
    if nothing := _learned_nothing(results):
        target += (
            f" Warning: {' and '.join(nothing)} ended no better than the share of the largest class "
            f"({accuracy_text(results.largest_class)}), so learned nothing: no speed-up is given."
        )
    if len(results.methods) == 1:
        return target
    return f"{target} Speed-up and percentages are relative to {results.methods[0].name}."


def _learned_nothing(results: Results) -> list[str]:
    """Return the names of methods whose model is no better than one that always says the largest class."""
    share = results.largest_class
    return [
        method.name
        for method in results.methods
        if share is not None
        and method.final_accuracy is not None
        and method.final_accuracy <= share + _NO_BETTER
    ]


def _final_accuracy(method: Method, results: Results) -> str:
    """Leave the spread of a single seed out: it is zero and means nothing."""
    deviation = None if len(results.seeds) == 1 else method.final_accuracy_std
    return accuracy_text(method.final_accuracy, deviation)


def _target_time(method: Method, target: float | None) -> str:
    if method.seconds_to_target is not None:
        return seconds_text(method.seconds_to_target)
    return MISSING if target is None else "not reached"


def _speedup(first: Method, method: Method, to_target: bool) -> float | None:
    if to_target:
        return _ratio(first.seconds_to_target, method.seconds_to_target)
    return _ratio(first.seconds, method.seconds)


def _traffic(count: float | None, reference: float | None) -> str:
    share = _ratio(count, reference)
    return bytes_text(count) if share is None else f"{bytes_text(count)} ({percent_text(share)})"


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None or below <= 0 else above / below
