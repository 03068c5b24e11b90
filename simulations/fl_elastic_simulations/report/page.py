"""The report of a simulation as one HTML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fl_elastic.errors import ElasticError
from fl_elastic_simulations.report.document import Figure, Grid, Panel, Section, write_document
from fl_elastic_simulations.report.figures import (
    accuracy_by_round,
    accuracy_by_time,
    accuracy_by_uplink,
    coverage_map,
    label_split,
    speed_bars,
)
from fl_elastic_simulations.report.formats import factor_text
from fl_elastic_simulations.report.summary import DeviceClass, Results, read_summary
from fl_elastic_simulations.report.tables import (
    clients_grid,
    cuts_grid,
    memory_grid,
    rejections_grid,
    results_grid,
    running_sentence,
    spread_grid,
    target_sentence,
)

_NOTHING = "The summary holds nothing to draw here."
_TABLES = (
    (
        "cuts", "The fleet's cut", cuts_grid,
        "Below a cut nobody trains, and clients keep the features that come out there. "
        "The last column is the share, over all seeds, that was found again instead of computed.",
    ),
    (
        "rejected", "Updates left out", rejections_grid,
        "Updates that were not merged, over all seeds, and the rounds that they were left out of. "
        "Reasons are those that the server noted, without their numbers.",
    ),
    (
        "memory", "Memory of a step", memory_grid,
        "The most that a step took beyond the weights and inference, as predicted by the cost profile: what "
        "memory_bytes of a fleet's entry limits. Layers that run narrower count as "
        "whole. A device that could not hold its step has no figure.",
    ),
    (
        "spread", "The worst clients", spread_grid,
        "How good the last model is for each client: its accuracy on test examples in the proportions of the "
        "client's own classes, the mean over seeds. Nine clients in ten are at least at the tenth percentile.",
    ),
    (
        "clients", "Each client", clients_grid,
        "Rounds are those that were merged. Busy is the simulated time of training, sending and receiving.",
    ),
)  # fmt: skip
"""Id, title, table and guide of sections that only exist if their table does."""


def write_page(summary: Mapping[str, object], path: str | os.PathLike[str]) -> Path:
    """Write the report of a simulation as one self-contained HTML page.

    Parameters
    ----------
    summary : mapping
        Content of the ``summary.json`` that ``fl-elastic simulate`` writes.
    path : path-like
        The file to write. It is replaced atomically, so that a reader never sees half a page.

    Returns
    -------
    Path
        Path of the page.

    Raises
    ------
    ElasticError
        If the file cannot be written.
    """
    results = read_summary(summary)
    seeds = {"seeds": ", ".join(map(str, results.seeds))} if results.seeds else {}
    sections = [
        Section(
            "results",
            "Results",
            grid=results_grid(results),
            dots=True,
            guide=running_sentence(results),
            note=target_sentence(results),
        ),
        *_courses(results),
        _coverage(results),
        _drawn(
            results,
            "speed",
            "Step speed by device class",
            "The frame is how much faster local training was asked to be, the solid bar how much it was: "
            "measured time per step of a full round, by cheaper steps and by steps left out; "
            "a bar that ends inside its frame fell short.",
            speed_bars(results),
        ),
        *_tables(results),
        *_split(results),
        *_setting_in_full(results),
    ]
    try:
        return write_document(
            path, "report", title=results.title, sections=sections,
            facts={**seeds, **results.environment}, linked=True, results=results, setting=_setting(results),
        )  # fmt: skip
    except OSError as error:
        raise ElasticError(
            f"cannot write the report {os.fspath(path)!r}: {error.strerror}; choose another place"
        ) from error


def _courses(results: Results) -> list[Section]:
    seeds = max((len({point.seed for point in m.history}) for m in results.methods), default=0)
    band = f" The line is the mean of {seeds} seeds, the band their range." if seeds > 1 else ""
    goal = "" if results.target_accuracy is None else ": compare where the lines meet the target"
    per_round = "Rounds of methods with shorter rounds are not worth as much: the figure beside it goes by time."
    less = "Further left is less sent by all clients for the same accuracy."
    return [
        _drawn(results, name, f"Accuracy against {what}", f"{guide}{band}", drawn)
        for name, what, guide, drawn in (
            ("time", results.clock, f"Further left is sooner{goal}.", accuracy_by_time(results)),
            ("round", "rounds", per_round, accuracy_by_round(results)),
            ("uplink", "uplink", less, accuracy_by_uplink(results)),
        )
    ]


def _tables(results: Results) -> list[Section]:
    made: list[tuple[str, str, Grid | None, str]] = [
        (name, title, table(results), guide) for name, title, table, guide in _TABLES
    ]
    return [Section(name, title, guide, grid=grid) for name, title, grid, guide in made if grid]


def _split(results: Results) -> list[Section]:
    split = label_split(results)
    guide = "Training examples of each class that each client holds, with the first seed."
    return [Section("split", "Who holds which classes", guide, split)] if split else []


def _setting_in_full(results: Results) -> list[Section]:
    if not results.scenario and not results.command:
        return []
    text = "\n\n".join(part for part in (results.command, results.scenario) if part)
    return [Section("scenario", "Scenario and command", "What this page was made from.", text=text)]


def _drawn(results: Results, name: str, title: str, guide: str, drawn: Figure | None) -> Section:
    """Return a section with a figure and its legend, or with a note if there is no figure."""
    if drawn is None:
        return Section(name, title, guide=_NOTHING)
    return Section(name, title, guide, drawn, [method.name for method in results.methods])


def _coverage(results: Results) -> Section:
    """Return the maps of coverage: one panel per device class, one choice per method with coverage.

    The method shown first is the last one other than ``full``, if there is one.
    """
    title = "What each device class trained"
    covered = {i: m.name for i, m in enumerate(results.methods) if any(m.coverage.values())}
    if not covered:
        return Section("coverage", title, "The summary holds no coverage.")
    partial = [position for position, name in covered.items() if name != "full"]
    chosen = (partial or list(covered))[-1]
    return Section(
        "coverage",
        title,
        "Each cell is one tensor group in one round: the stronger its colour, the larger the share "
        "of that class's clients that trained it. The top row is the group next to the loss. Rows below a cut are "
        "empty.",
        panels=[
            Panel(device.shown, _facts(device), coverage_map(results, device, chosen))
            for device in results.devices
            if any(method.coverage.get(device.device) for method in results.methods)
        ],
        choices=covered,
        chosen=chosen,
    )


def _setting(results: Results) -> str:
    """Return a sentence about the setting, from the parts that the summary knows."""
    clients = results.clients or sum(device.count or 0 for device in results.devices)
    who = _counted(clients, "client") if clients else "Clients"
    classes = len(results.devices)
    parts = [
        f"{who} of {_counted(classes, 'device class', 'es')}" if classes else who,
        f"train {results.model or 'one model'}",
        f"on {results.dataset}" if results.dataset else "",
        f"for {_counted(results.rounds, 'round')}" if results.rounds else "",
        f"with {_counted(len(results.seeds), 'seed')}" if results.seeds else "",
    ]
    return " ".join(part for part in parts if part) + "."


def _facts(device: DeviceClass) -> str:
    parts = {
        _counted(device.count or 0, "client"): device.count,
        f"slowdown {factor_text(device.slowdown)}": device.slowdown,
        f"asked for {factor_text(device.requested_speedup)}": device.requested_speedup,
    }
    return ", ".join(text for text, value in parts.items() if value is not None)


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
