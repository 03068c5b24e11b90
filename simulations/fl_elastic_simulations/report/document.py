"""A page: a template filled by jinja2 and figures that plotly.js draws, in one file that needs no network.

Both are imported when a page is written: a command that writes none does not wait for them. A page of stills does
without plotly: a device has no memory to spare.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

from fl_elastic.errors import ElasticError
from fl_elastic.storage import OWNER_ONLY, write_atomically
from fl_elastic_simulations.report.palette import EMPTY, ink
from fl_elastic_simulations.report.tables import Grid

__all__ = [
    "WIDTH",
    "Figure",
    "Panel",
    "Section",
    "drawn_text",
    "figure",
    "marks",
    "write_document",
]

WIDTH = 640
_RIGHT, _TOP, _BOTTOM = 12, 10, 30

Scale = Callable[[float], float]


def marks(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return where everything lies of a figure of lines from zero on, stacked areas or cells.

    In units of a drawing that is `WIDTH` wide: its height, where its axis begins (``left``), ticks of ``rows`` and
    ``columns`` with their texts, dashed vertical lines (``dashed``), ``paths`` (points, colour, fill or nothing,
    name), ``cells`` (left, upper edge, width, height, colour, name) and titles of the axes, ``across`` and ``up``.
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
        "across": layout["xaxis"].get("title", {}).get("text", ""),
        "up": axis.get("title", {}).get("text", ""),
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


Figure = Mapping[str, Any]
"""Traces (``data``) and ``layout`` as plotly.graph_objects takes them."""

_AXIS = {
    "automargin": True, "ticks": "", "ticklabelstandoff": 6, "title": {"standoff": 10, "font": {"size": 12}},
}  # fmt: skip
_CLEAR = "rgba(0,0,0,0)"
# Colours of text, grid and ground come from the page's style sheet, which knows light and dark.
_HOUSE = {
    "layout": {
        "paper_bgcolor": _CLEAR, "plot_bgcolor": _CLEAR, "showlegend": False, "hovermode": "closest",
        "font": {"family": "system-ui, sans-serif", "size": 12}, "hoverlabel": {"align": "left"},
        "margin": {"l": 0, "r": 14, "t": 10, "b": 0}, "xaxis": _AXIS, "yaxis": _AXIS,
    }
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One of several small figures in a section."""

    title: str
    facts: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """What a page shows under one heading, from above: table, guide, legend, panels, figure, text, note.

    Parameters
    ----------
    name : str
        Its id; its figure is ``plot-NAME``, its panels are ``NAME-0``, ``NAME-1`` and so on.
    title, guide, note : str
        Plain text.
    figure : Figure, optional
        Made by the function `figure`; a trace belongs to the legend's name at the position in its ``legendgroup``.
    names : sequence of str
        Of the legend; a button for each hides it and shows it again.
    grid : Grid, optional
        A table.
    dots : bool
        Whether the rows of the table wear the colours of the legend.
    panels : sequence of Panel
        Figures that show one name at a time.
    choices : mapping of int to str
        Position and name of what the panels can show.
    chosen : int
        Position of what they show first.
    text : str
        Shown as it is, line by line, where the reader unfolds it.
    """

    name: str
    title: str
    guide: str = ""
    figure: Figure | None = None
    names: Sequence[str] = ()
    grid: Grid | None = None
    dots: bool = False
    note: str = ""
    panels: Sequence[Panel] = ()
    choices: Mapping[int, str] | None = None
    chosen: int = 0
    text: str = ""


def figure(traces: Sequence[Mapping[str, object]], height: int, **layout: object) -> Figure:
    """Return a figure in the style of the pages, as high as so many pixels.

    What is wrong with a trace or the layout is said by plotly, when a page is written.
    """
    return {"data": list(traces), "layout": {"template": _HOUSE, "height": height, **layout}}


def drawn_text(text: str) -> str:
    """Escape a text for plotly.js, which reads a small part of HTML in names, ticks and titles."""
    return escape(text, quote=False)


def write_document(
    path: str | os.PathLike[str],
    template: str,
    *,
    title: str,
    sections: Sequence[Section],
    facts: Mapping[str, object],
    linked: bool = False,
    still: bool = False,
    **values: object,
) -> Path:
    """Write a page; it is replaced in one step, so that a reader never sees half of it.

    Parameters
    ----------
    path : path-like
        The file.
    template : str
        Name of the template, which adds an introduction to the common page.
    title : str
        Of the page.
    sections : sequence of Section
        From above.
    facts : mapping
        What it was measured with, for the foot.
    linked : bool
        Whether all legends name the same, and whoever hides a name in one figure hides it in all.
    still : bool
        Whether figures are drawn without script: no reader can hover or zoom, and the page is small.
    **values
        What else the template shows.

    Raises
    ------
    ElasticError
        If jinja2, or plotly for a page that is not still, is not installed.
    """
    jinja = _needed("jinja2")
    pages = jinja.Environment(
        loader=jinja.PackageLoader(__package__),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.globals.update(ink=ink, EMPTY=EMPTY, WIDTH=WIDTH)
    figures = _figures(sections)
    shown: dict[str, object]
    if still:
        shown = {"stills": {name: marks(each) for name, each in figures.items()}}
    else:
        checked = _needed("plotly.graph_objects").Figure
        figures = {name: checked(each).to_plotly_json() for name, each in figures.items()}
        # Plotly's own writer makes null of what is no number; jinja2 keeps what ends a script out of it.
        pages.policies["json.dumps_function"] = _needed("plotly.io.json").to_json_plotly
        pages.policies["json.dumps_kwargs"] = {"engine": "json"}
        shown = {"figures": figures, "plotly": _needed("plotly.offline").get_plotlyjs()}
    text = pages.get_template(f"{template}.html.md").render(
        title=title, sections=sections, facts=facts, linked=linked, still=still, **shown, **values
    )
    # A lone surrogate in a name becomes a character reference and spoils no whole page.
    # One that a device writes lies beside its samples.
    mode = OWNER_ONLY if still else None
    return write_atomically(path, text.encode(errors="xmlcharrefreplace"), mode)


def _figures(sections: Sequence[Section]) -> dict[str, Figure]:
    """Return all figures of a page by id; empty places have none."""
    found = {}
    for section in sections:
        found[f"plot-{section.name}"] = section.figure
        for index, panel in enumerate(section.panels):
            found[f"{section.name}-{index}"] = panel.figure
    return {name: drawn for name, drawn in found.items() if drawn is not None}


def _needed(module: str) -> Any:
    """Import what only a page needs."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ElasticError(f"the page needs {name}; pip install {name}") from None
