"""A page: a template filled by jinja2 and figures drawn by plotly.js, in one file that needs no network.

Both packages are imported only when a page is written. A page of stills does not need plotly, since a device has no
memory to spare.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fl_elastic.state.files import OWNER_ONLY, write_atomically
from fl_elastic_simulations.report.formats import abbreviated
from fl_elastic_simulations.report.palette import EMPTY, ink

WIDTH = 640
_MOST_TICKS = 16

Figure = Mapping[str, Any]
"""Traces (``data``) and ``layout``, as for plotly.graph_objects."""

_AXIS = {
    "automargin": True, "ticks": "", "ticklabelstandoff": 6, "title": {"standoff": 10, "font": {"size": 12}},
}  # fmt: skip
_CLEAR = "rgba(0,0,0,0)"
# Colours of text, grid and background come from the page's style sheet, which has a light and a dark version.
_HOUSE = {
    "layout": {
        "paper_bgcolor": _CLEAR, "plot_bgcolor": _CLEAR, "showlegend": False, "hovermode": "closest",
        "font": {"family": "system-ui, sans-serif", "size": 12}, "hoverlabel": {"align": "left"},
        "margin": {"l": 0, "r": 14, "t": 10, "b": 0}, "xaxis": _AXIS, "yaxis": _AXIS,
    }
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Headings and rows of plain text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Panel:
    """One of several small figures in a section."""

    title: str
    facts: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """Content of a page under one heading, from top to bottom: table, guide, legend, panels, figure, text, note.

    Parameters
    ----------
    name : str
        Id of the section; its figure is ``plot-NAME``, its panels are ``NAME-0``, ``NAME-1`` and so on.
    title, guide, note : str
        Plain text.
    figure : Figure or drawing, optional
        Result of the function `figure`; a trace belongs to the legend's name at the position in its
        ``legendgroup``. On a page without script, a drawing for the template's macro ``picture``.
    names : sequence of str
        Names of the legend; a button for each name hides and shows it.
    grid : Grid, optional
        A table.
    dots : bool
        Whether the rows of the table have the colours of the legend.
    panels : sequence of Panel
        Figures that show one name at a time.
    choices : mapping of int to str
        Position and name of everything that the panels can show.
    chosen : int
        Position of what the panels show first.
    text : str
        Text that is shown line by line, unformatted, when the reader unfolds it.
    """

    name: str
    title: str
    guide: str = ""
    figure: Any = None
    names: Sequence[str] = ()
    grid: Grid | None = None
    dots: bool = False
    note: str = ""
    panels: Sequence[Panel] = ()
    choices: Mapping[int, str] | None = None
    chosen: int = 0
    text: str = ""


def figure(traces: Sequence[Mapping[str, object]], height: int, **layout: object) -> Figure:
    """Return a figure in the style of the pages; ``height`` is in pixels.

    Plotly reports mistakes in a trace or the layout when a page is written.
    """
    return {"data": list(traces), "layout": {"template": _HOUSE, "height": height, **layout}}


def row_ticks(names: Sequence[str]) -> list[tuple[float, str]]:
    """Return the rows of a map that get a name beside them, as many as are readable."""
    step = -(-len(names) // _MOST_TICKS) or 1
    return [(row, abbreviated(names[row])) for row in range(0, len(names), step)]


def drawn_text(text: str) -> str:
    """Escape a text for plotly.js, which interprets a small part of HTML in names, ticks and titles."""
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
    """Write a page atomically, so that a reader never sees half of it.

    Parameters
    ----------
    path : path-like
        The file.
    template : str
        Name of the template, which adds an introduction to the common page.
    title : str
        Title of the page.
    sections : sequence of Section
        Sections from top to bottom.
    facts : mapping
        Environment of the measurements, shown at the bottom.
    linked : bool
        Whether all legends have the same names, so that hiding a name in one figure hides it in all.
    still : bool
        Whether figures are drawn without script: readers cannot hover or zoom, and the page is small.
    **values
        Further values for the template.
    """
    import jinja2

    pages = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.globals.update(ink=ink, EMPTY=EMPTY, WIDTH=WIDTH)
    shown: dict[str, object] = {"figures": _figures(sections)}
    if not still:
        from plotly import graph_objects, offline
        from plotly.io.json import to_json_plotly

        figures = {
            name: graph_objects.Figure(each).to_plotly_json()
            for name, each in _figures(sections).items()
        }
        # Plotly's own writer turns NaN into null; jinja2 escapes text that would end a script.
        pages.policies["json.dumps_function"] = to_json_plotly
        pages.policies["json.dumps_kwargs"] = {"engine": "json"}
        shown = {"figures": figures, "plotly": offline.get_plotlyjs()}
    text = pages.get_template(f"{template}.html.md").render(
        title=title, sections=sections, facts=facts, linked=linked, still=still, **shown, **values
    )
    # A lone surrogate in a name becomes a character reference and does not spoil the page. A page written by a
    # device lies beside its samples, so only the owner may read it.
    mode = OWNER_ONLY if still else None
    return write_atomically(path, text.encode(errors="xmlcharrefreplace"), mode)


def _figures(sections: Sequence[Section]) -> dict[str, Any]:
    """Return all figures of a page by id, without empty ones."""
    found = {}
    for section in sections:
        found[f"plot-{section.name}"] = section.figure
        for index, panel in enumerate(section.panels):
            found[f"{section.name}-{index}"] = panel.figure
    return {name: drawn for name, drawn in found.items() if drawn is not None}
