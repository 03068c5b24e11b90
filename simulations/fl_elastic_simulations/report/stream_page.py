"""How a stream went, as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_elastic_simulations.report.document import (
    Figure,
    Section,
    drawn_text,
    figure,
    write_document,
)
from fl_elastic_simulations.report.figures import row_names
from fl_elastic_simulations.report.formats import bytes_text
from fl_elastic_simulations.report.palette import ink

__all__ = ["shares_along", "stream_sections", "write_stream_page"]

_UNLABELLED = "none"
_MOST_GROUPS = 60
_ALONG = {"title": {"text": "labelled samples"}, "rangemode": "tozero", "showgrid": False}
# Paler where the colours come again.
_FILLS = {"solid": 0.8, "dash": 0.45, "dashdot": 0.2}

Series = Mapping[str, Sequence[tuple[float, float]]]


def write_stream_page(summary: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a summary that `fl_elastic.streaming.summary.stream_summary` made."""
    refused = sum(summary["refused"].values())
    latest = summary["prequential_accuracy"]
    setting = "; ".join(
        [
            f"{summary['observed']} samples, {summary['labelled']} with a label, {refused} refused",
            "no label yet" if latest is None else f"accuracy of late {100 * latest:.1f} %",
            f"{summary['drifts']} drifts",
            f"{summary['adaptations']} adaptations, {summary['rolled_back']} of them undone",
            f"a store of {bytes_text(summary['store_bytes'])}",
        ]
    )
    # Beside the state, on a device: its disk is small, and wears out.
    return write_document(
        path, "stream", still=True, title="A stream", sections=stream_sections(summary),
        facts=summary["environment"], setting=f"{setting}.",
    )  # fmt: skip


def stream_sections(
    summary: Mapping[str, Any], name: str = "stream", whose: str = ""
) -> list[Section]:
    """Return the figures of a summary: accuracy with drifts, what was trained when, the store by class.

    Parameters
    ----------
    summary : mapping
        That of the stream.
    name : str
        What the ids of the sections begin with.
    whose : str
        What their titles begin with.
    """
    points = summary["points"]
    if not points:
        nothing = "No label has come yet: there is nothing to draw."
        return [Section(name, f"{whose}Accuracy along the stream", nothing)]
    accuracy = [(point["labelled"], point["accuracy"]) for point in points]
    made = [Section(
        f"{name}-accuracy", f"{whose}Accuracy along the stream",
        "Of predictions made before anything was learned of the sample. Dashed: drifts that were noticed.",
        shares_along({"accuracy": accuracy}, summary["drift_marks"], up="accuracy"),
    )]  # fmt: skip
    if summary["groups"]:
        made.append(Section(
            f"{name}-trained", f"{whose}What was trained when",
            "A row for each part of the model that was ever trained, input first; grey: undone by the guard.",
            _trained(summary, float(points[-1]["labelled"])),
        ))  # fmt: skip
    labels = sorted({label for point in points for label in point["stored"]}, key=_place)
    stored = {
        "no label" if label == _UNLABELLED else f"class {label}": [
            (point["labelled"], float(point["stored"].get(label, 0))) for point in points
        ]
        for label in labels
    }
    made.append(Section(
        f"{name}-store", f"{whose}The store by class", "Samples in the store.",
        _stacked(stored), list(stored),
    ))  # fmt: skip
    return made


def _place(label: str) -> tuple[bool, int]:
    """Return where a label comes: first those without one, then classes by their number."""
    return (False, 0) if label == _UNLABELLED else (True, int(label))


def shares_along(series: Series, marks: Sequence[float] = (), *, up: str = "share") -> Figure:
    """Return shares between 0 and 1 along a stream, a line each, with dashed marks such as those of drifts.

    ``up`` says what they are shares of, or what they are.
    """
    dashed = {"dash": "dash", "width": 1}
    return figure(
        [
            {**_curve(place, name, points), "hovertemplate": "%{y:.1%} after %{x}"}
            for place, (name, points) in enumerate(series.items())
        ],
        300,
        xaxis=_ALONG,
        yaxis={"range": [0, 1], "tickformat": ".0%", "title": {"text": up}},
        shapes=[
            {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": dashed}
            for at in marks
        ],
    )


def _stacked(series: Series) -> Figure:
    """Return counts along a stream, one on top of the other."""
    traces = [
        {
            **_curve(place, name, points),
            "stackgroup": "all",
            "fillcolor": ink(place).faint(_FILLS[ink(place).dash]),
        }
        for place, (name, points) in enumerate(series.items())
    ]
    up = {"rangemode": "tozero", "title": {"text": "samples in the store"}}
    return figure(traces, 300, xaxis=_ALONG, yaxis=up)


def _curve(place: int, name: str, points: Sequence[tuple[float, float]]) -> dict[str, object]:
    style = ink(place)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": drawn_text(name),
        "legendgroup": str(place),
        "x": [at for at, _ in points],
        "y": [value for _, value in points],
        "line": {"color": style.colour, "dash": style.dash, "width": 2},
    }


def _trained(summary: Mapping[str, Any], end: float) -> Figure:
    """Return a map: a row for each group, and at each adaptation a cell for every row that was trained."""
    # A row for each of a hundred parts would be lines only: neighbours share one.
    together = -(-len(summary["groups"]) // _MOST_GROUPS)
    names, adapted = summary["groups"][::together], summary["adapted"]
    width = 0.8 * end / max(len(adapted), 1)
    edges: list[float] = []
    columns: list[list[int | None]] = []
    for index, each in enumerate(adapted):
        after = adapted[index + 1]["at"] if index + 1 < len(adapted) else each["at"] + width
        edges += [each["at"], min(each["at"] + width, after)]
        rows = {row // together for row in each["trained"]}
        kept = 0 if each["undone"] else 1
        columns += [
            [kept if row in rows else None for row in range(len(names))],
            [None] * len(names),
        ]
    cells = {
        "type": "heatmap",
        "x": edges,
        "y0": 0,
        "dy": 1,
        # An edge more than columns: behind the last one there is no gap.
        "z": [list(row) for row in zip(*columns[:-1], strict=True)],
        "zmin": 0,
        "zmax": 1,
        "showscale": False,
        "colorscale": [[0, ink(0).colour], [1, ink(1).colour]],
        "ygap": 1,
        "hoverongaps": False,
        "meta": [drawn_text(name) for name in names],
        "hovertemplate": "<b>%{text}</b><extra></extra>",
    }
    return figure(
        [cells] if adapted else [], 40 + 15 * len(names), xaxis=_ALONG, yaxis=row_names(names)
    )
