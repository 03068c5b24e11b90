"""The tables of a simulation, for its page and the terminal."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fl_elastic_simulations.report.document import Grid
from fl_elastic_simulations.report.formats import (
    MISSING,
    accuracy_text,
    bytes_text,
    percent_text,
    ratio_text,
    seconds_text,
    spans_text,
)
from fl_elastic_simulations.report.summary import (
    DeviceResult,
    Method,
    Results,
    read_summary,
)

# An accuracy that exceeds the largest class's share by no more than this does so by chance.
_NO_BETTER = 0.005


def results_grid(results: Results) -> Grid:
    """Return one row per method, compared with the first method.

    The speed-up is that of the time to the target. If the first method never reached the target, the whole column
    compares the total time instead, and its heading says so. A method that is no better than the largest class's
    share has learned nothing: no speed-up is given for it, or relative to it.
    """
    first = results.methods[0]
    nothing = set(_learned_nothing(results))
    to_target = first.seconds_to_target is not None
    spent = "seconds_to_target" if to_target else "simulated_seconds"
    rejected = any(method.rejected_updates for method in results.methods)
    time = results.clock.capitalize()
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
    # The standard deviation of a single seed is meaningless.
    spread = len(results.seeds) != 1
    never = MISSING if results.target_accuracy is None else "not reached"
    rows = tuple(
        (
            method.name,
            accuracy_text(method.final_accuracy, method.final_accuracy_std if spread else None),
            never if method.seconds_to_target is None else seconds_text(method.seconds_to_target),
            seconds_text(method.simulated_seconds),
            MISSING
            if {first.name, method.name} & nothing
            else ratio_text(_ratio(getattr(first, spent), getattr(method, spent))),
            _traffic(method.uplink_bytes, first.uplink_bytes),
            _traffic(method.downlink_bytes, first.downlink_bytes),
            *((str(method.rejected_updates),) if rejected else ()),
        )
        for method in results.methods
    )
    return Grid(headings, rows)


def results_table(summary: Mapping[str, object]) -> Table:
    """Return the results of a simulation as a table for the terminal.

    Parameters
    ----------
    summary : mapping
        Content of the ``summary.json`` that ``fl-elastic simulate`` writes.
    """
    results = read_summary(summary)
    grid = results_grid(results)
    # Text instead of str: a name such as "[red]" must not be taken for markup.
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
            # Never cut the words of a heading, however narrow the terminal is.
            min_width=max(map(len, heading.split())),
        )
    for name, *cells in grid.rows:
        # Deviation and percentage go to a second line, so that seven columns fit eighty characters.
        shown = (cell.replace(" (", "\n(").replace(" ±", "\n±") for cell in cells)
        table.add_row(Text(name), *map(Text, shown))
    return table


def target_sentence(results: Results) -> str:
    """Return a sentence that states the target and the reference of the percentages."""
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


def running_sentence(results: Results) -> str:
    """Return a sentence about the run that goes on; empty if it has ended."""
    if (now := results.running) is None:
        return ""
    of = f" of {results.rounds}" if results.rounds else ""
    return (
        f"This run goes on: {now.method} with seed {now.seed} was tested after round {now.round}{of}, and its "
        "figures are those so far."
    )


def _learned_nothing(results: Results) -> list[str]:
    """Return the names of methods whose model is no better than always predicting the largest class."""
    share = results.largest_class
    return [
        method.name
        for method in results.methods
        if share is not None
        and method.final_accuracy is not None
        and method.final_accuracy <= share + _NO_BETTER
    ]


def cuts_grid(results: Results) -> Grid | None:
    """Return one row per position of the fleet's cut; None if no method has a cut."""
    rows = []
    for method in results.methods:
        met = method.features_found + method.features_computed
        kept = percent_text(method.features_found / met) if met else MISSING
        for index, cut in enumerate(method.cuts):
            group = cut.group or "everything is trained"
            since = seconds_text(cut.simulated_seconds)
            rows.append((method.name, str(cut.seed), since, group, "" if index else kept))
    headings = (
        "Method",
        "Seed",
        results.clock.capitalize(),
        "Trained from here up",
        "Features found again",
    )
    return Grid(headings, tuple(rows)) if rows else None


def rejections_grid(results: Results) -> Grid | None:
    """Return one row per method and reason for not merging updates; None if all were merged."""
    rows = []
    for method in results.methods:
        left_out = pd.DataFrame([each.model_dump() for each in method.rejections])
        if left_out.empty:
            continue
        by_reason = left_out.groupby("reason").agg(
            updates=("updates", "sum"), rounds=("round", set)
        )
        for reason, each in by_reason.sort_values(
            "updates", ascending=False, kind="stable"
        ).iterrows():
            rows.append(
                (method.name, str(reason), str(each["updates"]), spans_text(each["rounds"]))
            )
    return Grid(("Method", "Reason", "Updates", "Rounds"), tuple(rows)) if rows else None


def memory_grid(results: Results) -> Grid | None:
    """Return one row per device class: its memory limit and the largest step of each method; None if unknown."""
    rows = []
    for device in results.devices:
        found = [m.devices.get(device.device, DeviceResult()).peak_bytes for m in results.methods]
        if any(each is not None for each in found):
            limit = "none" if device.memory_bytes is None else bytes_text(device.memory_bytes)
            rows.append((device.shown, limit, *map(bytes_text, found)))
    names = (method.name for method in results.methods)
    return Grid(("Device", "Limit", *names), tuple(rows)) if rows else None


def spread_grid(results: Results) -> Grid | None:
    """Return one row per method: accuracy of its last model for the worst and the best client, and in between."""
    rows = tuple(
        (
            method.name,
            accuracy_text(method.worst_client),
            accuracy_text(method.tenth_percentile),
            accuracy_text(method.best_client),
        )
        for method in results.methods
        if method.clients
    )
    headings = ("Method", "Worst client", "Tenth percentile", "Best client")
    return Grid(headings, rows) if rows else None


def clients_grid(results: Results) -> Grid | None:
    """Return one row per client: its data, and under each method accuracy, rounds, busy time and bytes sent."""
    methods = [method for method in results.methods if method.clients]
    if not methods:
        return None
    labels = {device.device: device.shown for device in results.devices}
    headings = ["Client", "Device", "Examples"]
    for method in methods:
        headings += [f"{method.name}: {what}" for what in ("accuracy", "rounds", "busy", "sent")]
    rows = []
    for index, first in enumerate(methods[0].clients):
        row = [str(index), labels.get(first.device, first.device), _whole(first.examples)]
        for method in methods:
            row += _spent(method, index)
        rows.append(tuple(row))
    return Grid(tuple(headings), tuple(rows))


def _spent(method: Method, index: int) -> list[str]:
    if index >= len(method.clients):
        return [MISSING] * 4
    client = method.clients[index]
    return [
        accuracy_text(client.accuracy),
        _whole(client.rounds),
        seconds_text(client.seconds),
        bytes_text(client.uplink_bytes),
    ]


def _whole(number: float | None) -> str:
    return MISSING if number is None else f"{number:g}" if number % 1 == 0 else f"{number:.1f}"


def _traffic(count: float | None, reference: float | None) -> str:
    share = _ratio(count, reference)
    return bytes_text(count) if share is None else f"{bytes_text(count)} ({percent_text(share)})"


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None or below <= 0 else above / below
