"""A figure as marks that a template draws without script: plotly.js is too large for a device's disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import unescape
from typing import Any

__all__ = ["WIDTH", "Still", "marks"]

WIDTH = 640
_RIGHT, _TOP, _BOTTOM = 12, 10, 30

Scale = Callable[[float], float]


@dataclass(frozen=True)
class Still:
    """Where everything of a figure lies, in units of a drawing that is `WIDTH` wide.

    Parameters
    ----------
    height, left : float
        Of the drawing; where its axis begins.
    rows, columns : tuple of (float, str)
        Places and texts of the ticks.
    marks : tuple of float
        Where a vertical line is dashed.
    paths : tuple of (str, str, str, str)
        Points, colour, colour of the fill, which is empty for a line, and name.
    cells : tuple of (float, float, float, float, str, str)
        Left, upper edge, width, height, colour, name.
    """

    height: float
    left: float
    rows: tuple[tuple[float, str], ...]
    columns: tuple[tuple[float, str], ...]
    marks: tuple[float, ...]
    paths: tuple[tuple[str, str, str, str], ...]
    cells: tuple[tuple[float, float, float, float, str, str], ...]


def marks(drawn: Mapping[str, Any]) -> Still:
    """Return the marks of a figure of lines from zero on, stacked areas or cells, as plotly writes it."""
    traces, layout = drawn["data"], drawn["layout"]
    axis = layout["yaxis"]
    height: float = layout["height"]
    left = 110 if "ticktext" in axis else 46
    end = max((max(trace["x"]) for trace in traces), default=0) or 1
    stacks = [sum(counts) for counts in zip(*(t["y"] for t in traces if "y" in t), strict=False)]
    low, high = map(float, axis.get("range") or (0, max(stacks, default=0) or 1))
    parts = 4 if "tickformat" in axis else 2

    def x(at: float) -> float:
        return round(left + at / end * (WIDTH - left - _RIGHT), 1)

    def y(value: float) -> float:
        return round(height - _BOTTOM - (value - low) / (high - low) * (height - _BOTTOM - _TOP), 1)

    ticks = [low + (high - low) * part / parts for part in range(parts + 1)]
    texts = [f"{100 * each:.0f} %" if "tickformat" in axis else f"{each:.0f}" for each in ticks]
    named = zip(axis.get("tickvals", ticks), axis.get("ticktext", texts), strict=True)
    return Still(
        height=height,
        left=left,
        rows=tuple((y(place), unescape(text)) for place, text in named),
        columns=tuple((x(end * part / 4), f"{end * part / 4:.0f}") for part in range(5)),
        marks=tuple(x(shape["x0"]) for shape in layout.get("shapes", ())),
        paths=_paths([trace for trace in traces if trace["type"] == "scatter"], x, y),
        cells=tuple(cell for t in traces if t["type"] == "heatmap" for cell in _cells(t, x, y)),
    )


def _paths(
    traces: list[Mapping[str, Any]], x: Scale, y: Scale
) -> tuple[tuple[str, str, str, str], ...]:
    """Return a line for each trace, or an area that stands on the one before."""
    found = []
    ground = [0.0] * max((len(trace["x"]) for trace in traces), default=0)
    for trace in traces:
        stacked, below = "stackgroup" in trace, ground
        values = trace["y"]
        if stacked:
            values = ground = [b + value for b, value in zip(below, values, strict=True)]
        points = list(zip(trace["x"], values, strict=True))
        if stacked:
            points += reversed(list(zip(trace["x"], below, strict=True)))
        path = " ".join(f"{x(at)},{y(value)}" for at, value in points)
        fill = trace["fillcolor"] if stacked else ""
        found.append((path, trace["line"]["color"], fill, unescape(trace["name"])))
    return tuple(found)


def _cells(
    trace: Mapping[str, Any], x: Scale, y: Scale
) -> list[tuple[float, float, float, float, str, str]]:
    edges, colours = trace["x"], dict(trace["colorscale"])
    return [
        (
            x(edges[column]),
            y(row - 0.45),
            round(x(edges[column + 1]) - x(edges[column]), 1),
            round(y(row + 0.45) - y(row - 0.45), 1),
            colours[value],
            unescape(trace["meta"][row]),
        )
        for row, values in enumerate(trace["z"])
        for column, value in enumerate(values)
        if value is not None
    ]
