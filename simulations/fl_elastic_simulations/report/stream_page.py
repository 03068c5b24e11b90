"""The course of a stream, as one HTML file of drawings without script: a device has no memory for plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic_simulations.report.document import WIDTH, Section, row_ticks, write_document
from fl_elastic_simulations.report.formats import bytes_text
from fl_elastic_simulations.report.palette import ink

_UNLABELLED = "none"
_MOST_GROUPS = 60
_RIGHT, _TOP, _BOTTOM = 12, 10, 30
# Opacity of fills; paler when the colours repeat.
_FILLS = {"solid": 0.8, "dash": 0.45, "dashdot": 0.2}


def write_stream_page(summary: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a summary from `fl_elastic.streaming.summary.stream_summary`."""
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
    # Written beside the state on a device, whose disk is small and wears out.
    return write_document(
        path, "stream", still=True, title="A stream", sections=stream_sections(summary),
        facts=summary["environment"], setting=f"{setting}.",
    )  # fmt: skip


def stream_sections(summary: Mapping[str, Any]) -> list[Section]:
    """Return the drawings of a summary: accuracy with drifts, trained parts over time, the store by class."""
    points = summary["points"]
    if not points:
        nothing = "No label has come yet: there is nothing to draw."
        return [Section("stream", "Accuracy along the stream", nothing)]
    made = [Section(
        "stream-accuracy", "Accuracy along the stream",
        "Of predictions made before anything was learned of the sample. Dashed: drifts that were noticed.",
        _accuracy(points, summary["drift_marks"]),
    )]  # fmt: skip
    if summary["groups"]:
        made.append(Section(
            "stream-trained", "What was trained when",
            "A row for each part of the model that was ever trained, input first; grey: undone by the guard.",
            _trained(summary, float(points[-1]["labelled"])),
        ))  # fmt: skip
    labels = sorted({label for point in points for label in point["stored"]}, key=_place)
    names = ["no label" if label == _UNLABELLED else f"class {label}" for label in labels]
    counts = np.array([[point["stored"].get(label, 0) for point in points] for label in labels])
    made.append(Section(
        "stream-store", "The store by class", "Samples in the store.",
        _stacked([point["labelled"] for point in points], names, counts.reshape(len(labels), len(points))), names,
    ))  # fmt: skip
    return made


def _place(label: str) -> tuple[bool, int]:
    """Return the sort key of a label: samples without a label first, then classes by number."""
    return (False, 0) if label == _UNLABELLED else (True, int(label))


@dataclass(frozen=True)
class Drawing:
    """A drawing along a stream, `WIDTH` wide, and the positions of its parts.

    Parameters
    ----------
    height, left : float
        Height of the drawing, and left end of its horizontal axis.
    end, low, high : float
        Labelled samples at the right edge, and values at the lower and the upper edge.
    rows : sequence of (float, str)
        Values of the vertical axis with a label, and the labels.
    up : str
        Title of the vertical axis.
    dashed : sequence of float
        Samples at which vertical lines are drawn.
    lines : sequence of (points, str, str, str)
        Points as samples and values, colour, fill (may be empty), name.
    blocks : sequence of (float, float, int, str, str)
        First sample, last sample, row, colour, name.
    """

    height: float
    left: float
    end: float
    low: float
    high: float
    rows: Sequence[tuple[float, str]]
    up: str = ""
    dashed: Sequence[float] = ()
    lines: Sequence[tuple[Sequence[tuple[float, float]], str, str, str]] = ()
    blocks: Sequence[tuple[float, float, int, str, str]] = ()

    def x(self, at: float) -> float:
        """Return the horizontal position of a number of samples."""
        return round(self.left + at / self.end * (WIDTH - self.left - _RIGHT), 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.height - _BOTTOM - share * (self.height - _BOTTOM - _TOP), 1)

    @property
    def columns(self) -> list[float]:
        """Numbers of samples that are labelled on the horizontal axis."""
        return [self.end * part / 4 for part in range(5)]


def _accuracy(points: Sequence[Mapping[str, Any]], drifts: Sequence[float]) -> Drawing:
    along = [(point["labelled"], point["accuracy"]) for point in points]
    rows = [(part / 4, f"{25 * part} %") for part in range(5)]
    return Drawing(
        300, 46, along[-1][0] or 1, 0, 1, rows, "accuracy", drifts, [(along, ink(0).colour, "", "accuracy")],
    )  # fmt: skip


def _stacked(at: Sequence[float], names: Sequence[str], counts: NDArray[np.int64]) -> Drawing:
    """Return counts along a stream, stacked on top of each other."""
    tops = counts.cumsum(axis=0)
    lines = []
    for place, name in enumerate(names):
        style, upper = ink(place), list(zip(at, tops[place].tolist(), strict=True))
        lower = list(zip(at, (tops[place] - counts[place]).tolist(), strict=True))
        fill = style.faint(_FILLS[style.dash])
        lines.append(([*upper, *reversed(lower)], style.colour, fill, name))
    high = float(tops[-1].max()) if len(names) else 0.0
    rows = [(high * part / 2, f"{high * part / 2:.0f}") for part in range(3)]
    return Drawing(300, 46, at[-1] or 1, 0, high or 1, rows, "samples in the store", lines=lines)


def _trained(summary: Mapping[str, Any], end: float) -> Drawing:
    """Return a map with a row for each group, and at each adaptation a block in every row that was trained."""
    # With more than a hundred rows there would only be lines, so neighbouring groups share a row.
    together = -(-len(summary["groups"]) // _MOST_GROUPS)
    names, adapted = summary["groups"][::together], summary["adapted"]
    width = 0.8 * end / max(len(adapted), 1)
    blocks = []
    for index, each in enumerate(adapted):
        after = adapted[index + 1]["at"] if index + 1 < len(adapted) else each["at"] + width
        until, colour = min(each["at"] + width, after), ink(0 if each["undone"] else 1).colour
        for row in sorted({row // together for row in each["trained"]}):
            blocks.append((each["at"], until, row, colour, names[row]))
    edge = max([end, *(until for _, until, *_ in blocks)]) or 1
    return Drawing(
        40 + 15 * len(names), 110, edge, len(names) - 0.5, -0.5, row_ticks(names), blocks=blocks
    )
