"""The tables of the federation benchmark as Markdown."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fl_elastic_simulations.benchmarks.federation_methods import SAME_HEAD
from fl_elastic_simulations.benchmarks.federation_summary import (
    cells_of,
    interval,
    sooner_than,
    summarise_task,
)
from fl_elastic_simulations.benchmarks.federation_tasks import (
    CONVERGED,
    LONGER,
    SEEDS,
    TASKS,
    FederationTask,
    methods_of,
)

__all__ = [
    "Tasks",
    "accuracy_with_interval",
    "charged_markdown",
    "converged_markdown",
    "ends_markdown",
    "federation_markdown",
    "filled",
    "points_with_interval",
]

_Rows = Mapping[str, Mapping[str, Any]]
Tasks = Mapping[str, FederationTask]
_NONE_YET = "No cell of this table is measured yet."


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
    reaches its final accuracy, and with how many times fewer bytes in both directions: of its longer run, where
    there is one.
    """
    columns = [
        (
            task.costs,
            f"{task.title}, {method}: {accuracy_with_interval(_mean_final(reference), None)}",
            reference,
        )
        for name, task in CONVERGED.items()
        for method, reference in cells_of(rows, name).items()
    ]
    if not columns:
        return [_NONE_YET]
    heads = " | ".join(title for _, title, _ in columns)
    lines = [f"| method | {heads} |", "| --- |" + " --- |" * len(columns)]
    for method in methods_of(among):
        cells = [_sooner(_longest(rows, task, method), reference) for task, _, reference in columns]
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def _longest(rows: _Rows, task: str, method: str) -> dict[int, Mapping[str, Any]]:
    """Return a method's cells of a task by seed, the longer runs where there are any."""
    runs = [task, *(name for name, longer in LONGER.items() if longer.costs == task)]
    return {seed: row for run in runs for seed, row in cells_of(rows, run).get(method, {}).items()}


def ends_markdown(rows: _Rows, among: Tasks) -> list[str]:
    """Return the lines of a Markdown table of the last test, before which a head may just have been solved for.

    Accuracy in %, with the 95 % interval where there are several seeds, and in brackets how many points more that
    is than full steps under the same head have with the same seeds.
    """
    cells = {name: cells_of(rows, name) for name in among}
    shown = [name for name in among if SAME_HEAD in cells[name]]
    if not shown:
        return [_NONE_YET]
    heads = " | ".join(among[name].title for name in shown)
    lines = [f"| method | {heads} |", "| --- |" + " --- |" * len(shown)]
    for method in methods_of(among):
        ends = [_end(cells[name].get(method, {}), cells[name][SAME_HEAD]) for name in shown]
        if any(ends):
            lines.append(f"| {method} | {' | '.join(ends)} |")
    return lines


def _end(cells: Mapping[int, Mapping[str, Any]], rival: Mapping[int, Mapping[str, Any]]) -> str:
    seeds = sorted(set(cells) & set(rival))
    if not seeds:
        return ""
    last, others = ([each[seed]["curve"][-1][-1] for seed in seeds] for each in (cells, rival))
    more = [mine - other for mine, other in zip(last, others, strict=True)]
    accuracy = f"{100 * statistics.fmean(last):.1f}{_around(interval(last))}"
    against = (
        f" ({points_with_interval(statistics.fmean(more), interval(more))})" if any(more) else ""
    )
    return f"{accuracy}{against}{_of_seeds(len(seeds))}"


def _of_seeds(count: int) -> str:
    """Say of how many seeds a figure is, where it is not of those with which every cell is run.

    >>> _of_seeds(1), _of_seeds(3), _of_seeds(5)
    (' [1 of 3 seeds]', '', ' [5 seeds]')
    """
    if count == len(SEEDS):
        return ""
    return f" [{count} of {len(SEEDS)} seeds]" if count < len(SEEDS) else f" [{count} seeds]"


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
    fewer = "" if seeds == len(reference) else f" [{seeds} of {len(reference)} seeds]"
    return (f"{times:.1f}x, {both:.1f}x{some}" if reached else "never") + fewer


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
    if row["time_ratio"] is None:
        ratios = "never"
    else:
        some = f" in {row['reached']} of {row['seeds']}" if row["reached"] < row["seeds"] else ""
        factors = (row["time_ratio"], row["uplink_ratio"], row["bytes_ratio"])
        ratios = ", ".join(f"{factor:.1f}x" for factor in factors) + some
    return (
        f"{100 * row['accuracy']:.1f}{_around(row['interval'])} ({ratios}){_of_seeds(row['seeds'])}"
    )


def _charged(row: Mapping[str, Any]) -> str:
    if not row["choosing_seconds"] and not row["profile_seconds"]:
        return "none"
    return ", ".join(
        f"{row[f'{name}_seconds']:.3g} s ({100 * row[f'{name}_share']:.1f} %)"
        for name in ("choosing", "profile")
    )


def filled(text: str, rows: _Rows, mark: str = "federation", among: Tasks = TASKS) -> str:
    r"""Return a document with the tables of these rows between its marks.

    A mark is ``<!-- federation accuracy -->``, or ``charges``, ``converged`` or ``ends`` in place of accuracy
    (and another word in place of federation, for another benchmark's rows), and the table ends with
    ``<!-- end -->``.

    >>> filled("<!-- federation accuracy -->\nold\n<!-- end -->", {}).splitlines()[1]
    'No cell of this table is measured yet.'
    """
    tables = {
        "accuracy": federation_markdown,
        "charges": charged_markdown,
        "converged": converged_markdown,
        "ends": ends_markdown,
    }

    def table(found: re.Match[str]) -> str:
        lines = tables[found[2]](rows, among)
        return "\n".join([found[1], *lines, found[3]])

    marked = rf"(<!-- {mark} (accuracy|charges|converged|ends) -->)\n.*?(<!-- end -->)"
    return re.sub(marked, table, text, flags=re.DOTALL)


def accuracy_with_interval(value: float, interval: float | None) -> str:
    """Return a share in %, with its interval.

    >>> accuracy_with_interval(0.512, 0.003)
    '51.2 ± 0.3 %'
    """
    return f"{100 * value:.1f}{_around(interval)} %"


def points_with_interval(value: float, interval: float | None) -> str:
    """Return a difference of accuracies in points, with its interval.

    >>> points_with_interval(0.012, 0.003), points_with_interval(-0.5, None)
    ('+1.2 ± 0.3', '-50.0')
    """
    return f"{100 * value:+.1f}{_around(interval)}"


def _around(interval: float | None) -> str:
    return "" if interval is None else f" \N{PLUS-MINUS SIGN} {100 * interval:.1f}"
