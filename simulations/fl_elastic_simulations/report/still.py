"""A figure as marks that a template draws without script: plotly.js is too large for a device's disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import unescape
from typing import Any

__all__ = ["WIDTH", "marks"]

WIDTH = 640
_RIGHT, _TOP, _BOTTOM = 12, 10, 30

Scale = Callable[[float], float]


def marks(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return where everything lies of a figure of lines from zero on, stacked areas or cells.

    In units of a drawing that is `WIDTH` wide: its height, where its axis begins (``left``), ticks of ``rows`` and
    ``columns`` with their texts, dashed vertical lines (``dashed``), ``paths`` (points, colour, fill or nothing,
    name) and ``cells`` (left, upper edge, width, height, colour, name).
    """
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
    return {
        "height": height,
        "left": left,
        "rows": [(y(place), unescape(text)) for place, text in named],
        "columns": [(x(end * part / 4), f"{end * part / 4:.0f}") for part in range(5)],
        "dashed": [x(shape["x0"]) for shape in layout.get("shapes", ())],
        "paths": _paths([each for each in traces if each["type"] == "scatter"], x, y),
        "cells": [cell for t in traces if t["type"] == "heatmap" for cell in _cells(t, x, y)],
    }


def _paths(traces: Sequence[Mapping[str, Any]], x: Scale, y: Scale) -> list[tuple[str, ...]]:
    """Return a line for each trace, or an area that stands on the one before."""
    found: list[tuple[str, ...]] = []
    ground = [0.0] * max((len(trace["x"]) for trace in traces), default=0)
    for trace in traces:
        points = list(zip(trace["x"], trace["y"], strict=True))
        fill = trace["fillcolor"] if "stackgroup" in trace else ""
        if fill:
            below = list(zip(trace["x"], ground, strict=True))
            ground = [base + value for base, value in zip(ground, trace["y"], strict=True)]
            points = [*zip(trace["x"], ground, strict=True), *reversed(below)]
        path = " ".join(f"{x(at)},{y(value)}" for at, value in points)
        found.append((path, trace["line"]["color"], fill, unescape(trace["name"])))
    return found


def _cells(trace: Mapping[str, Any], x: Scale, y: Scale) -> list[tuple[float | str, ...]]:
    edges, colours = [x(at) for at in trace["x"]], dict(trace["colorscale"])
    found: list[tuple[float | str, ...]] = []
    for row, values in enumerate(trace["z"]):
        top, high = y(row - 0.45), round(y(row + 0.45) - y(row - 0.45), 1)
        for column, value in enumerate(values):
            if value is not None:
                wide = round(edges[column + 1] - edges[column], 1)
                name = unescape(trace["meta"][row])
                found.append((edges[column], top, wide, high, colours[value], name))
    return found
