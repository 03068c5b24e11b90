"""The report of a simulation as one HTML file that asks no network for anything."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path

from fl_elastic.errors import ElasticError
from fl_elastic.storage import write_atomically
from fl_elastic_simulations.report.figures import (
    Figure,
    accuracy_by_time,
    accuracy_by_uplink,
    speed_bars,
)
from fl_elastic_simulations.report.heat import Heat, coverage_heat
from fl_elastic_simulations.report.sections import (
    coverage_section,
    foot,
    heading,
    plot_section,
    table_section,
)
from fl_elastic_simulations.report.style import STYLE
from fl_elastic_simulations.report.summary import Results, read_summary

__all__ = ["SCRIPT", "write_page"]

# The browser itself refuses every request to a network, whatever plotly.js may try.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
SCRIPT = """
(() => {
  "use strict";
  const page = JSON.parse(document.getElementById("report-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");
  const hidden = new Set();
  let chosen = page.heat ? page.heat.chosen : 0;

  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // No bar of buttons: it would cover the curves, and some of its buttons lead to the network.
  const config = { responsive: true, displayModeBar: false };

  // Colours and sizes that depend on the reader's screen, laid over what the report says.
  const themed = (layout) => {
    const ink = colour("--ink"), muted = colour("--muted"), line = colour("--line");
    const family = getComputedStyle(document.body).fontFamily;
    const axis = (own) => ({
      gridcolor: line, zerolinecolor: muted, showline: false, ticks: "", ticklabelstandoff: 6,
      tickfont: { color: muted }, fixedrange: narrow.matches, ...own,
      title: { standoff: 10, font: { color: muted, size: 12 }, ...(own && own.title) },
    });
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: 12, color: ink },
      margin: { l: 0, r: 14, t: 10, b: 0 },
      showlegend: false, autosize: true,
      // On a phone a finger on the plot must scroll the page.
      dragmode: narrow.matches ? false : "zoom",
      hoverlabel: {
        bgcolor: colour("--surface"), bordercolor: muted, align: "left",
        font: { family, color: ink, size: 12 },
      },
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      shapes: (layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: muted } })),
      annotations: (layout.annotations || []).map((a) => ({ ...a, font: { color: muted } })),
    };
  };

  const drawPlot = (plot) => {
    const traces = plot.traces.map((trace) => ({
      ...trace, visible: !hidden.has(Number(trace.legendgroup)),
    }));
    return Plotly.react(plot.id, traces, themed(plot.layout), config);
  };

  const drawPanel = (shares, index) => {
    const heat = page.heat, rows = heat.groups.length;
    const trace = {
      type: "heatmap", z: shares, x0: 1, dx: 1, zmin: 0, zmax: 1, showscale: false,
      xgap: heat.rounds > 30 ? 0 : 1, ygap: rows > 30 ? 0 : 1, hoverongaps: false,
      colorscale: [[0, colour("--empty")], [1, heat.colours[chosen]]],
      text: heat.groups.map((name) => Array(heat.rounds).fill(name)),
      hovertemplate: "<b>%{text}</b><br>round %{x}<br>share %{z:.0%}<extra></extra>",
    };
    const layout = themed({
      xaxis: {
        title: { text: "round" }, automargin: true, showgrid: false, zeroline: false,
        range: [0.5, heat.rounds + 0.5], nticks: 6, tickformat: "d", fixedrange: true,
      },
      yaxis: {
        automargin: true, showgrid: false, zeroline: false, fixedrange: true,
        tickvals: heat.tickvals, ticktext: heat.ticktext, range: [rows - 0.5, -0.5],
      },
    });
    return Plotly.react(`heat-${index}`, [trace], { ...layout, dragmode: false }, config);
  };

  const drawHeat = () => {
    if (!page.heat) return [];
    const section = document.getElementById("coverage");
    section.style.setProperty("--method", page.heat.colours[chosen]);
    return page.heat.shares[chosen].map(drawPanel);
  };

  const draw = () => {
    document.documentElement.dataset.drawn = "no";
    return Promise.all([...page.plots.map(drawPlot), ...drawHeat()]).then(() => {
      document.documentElement.dataset.drawn = "yes";
    });
  };

  const buttons = document.querySelectorAll("button[data-method]");
  buttons.forEach((button) => button.addEventListener("click", () => {
    const method = Number(button.dataset.method);
    if (!hidden.delete(method)) hidden.add(method);
    buttons.forEach((other) =>
      other.setAttribute("aria-pressed", String(!hidden.has(Number(other.dataset.method)))));
    draw();
  }));
  document.querySelectorAll("input[name=covered]").forEach((input) =>
    input.addEventListener("change", () => { chosen = Number(input.value); draw(); }));
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  draw();
})();
"""
"""Plain JavaScript; it reads everything it draws from the JSON block ``report-data``."""


def write_page(summary: Mapping[str, object], path: str | os.PathLike[str]) -> Path:
    """Write the report of a simulation as one self-contained HTML page.

    Parameters
    ----------
    summary : mapping
        What ``fl-elastic simulate`` writes as ``summary.json``. Only ``methods`` must be there.
    path : path-like
        The file to write. It is replaced in one step, so that a reader never sees half a page.

    Returns
    -------
    Path
        Where the page is.

    Raises
    ------
    ElasticError
        If plotly is not installed, the summary has no method or a part of a wrong type, or the
        file cannot be written.
    """
    page = Path(path)
    # A lone surrogate in a name becomes a character reference and spoils no whole report.
    text = _document(read_summary(summary), _plotly_script()).encode(errors="xmlcharrefreplace")
    try:
        write_atomically(page, text)
    except OSError as error:
        raise ElasticError(
            f"cannot write the report {str(page)!r}: {error.strerror}; choose another place"
        ) from error
    return page


def _plotly_script() -> str:
    """Return plotly.js; imported here because only the extra ``simulation`` brings plotly."""
    try:
        source = importlib.import_module("plotly.offline").get_plotlyjs()
    except ImportError:
        raise ElasticError("the report needs plotly; pip install plotly") from None
    return str(source)


def _document(results: Results, plotly: str) -> str:
    seeds = max((len({point.seed for point in m.history}) for m in results.methods), default=0)
    band = f" The line is the mean of {seeds} seeds, the band their range." if seeds > 1 else ""
    goal = "" if results.target_accuracy is None else ": compare where the lines meet the target"
    by_time, by_uplink = accuracy_by_time(results), accuracy_by_uplink(results)
    speeds, heat = speed_bars(results), coverage_heat(results)
    methods = results.methods
    clock = "simulated time" if results.simulated else "time"
    main = [
        heading(results),
        table_section(results),
        '<div class="pair">',
        plot_section(
            "time",
            f"Accuracy against {clock}",
            f"Further left is sooner{goal}.{band}",
            by_time,
            methods,
        ),
        plot_section(
            "uplink",
            "Accuracy against uplink",
            f"Further left is less sent by all clients for the same accuracy.{band}",
            by_uplink,
            methods,
        ),
        "</div>",
        coverage_section(results, heat),
        plot_section(
            "speed",
            "Step speed by device class",
            "The frame is how much faster local training was asked to be, the solid bar how much it was: "
            "measured time per step of a full round, by cheaper steps and by steps left out; "
            "a bar that ends inside its frame fell short.",
            speeds,
            methods,
        ),
    ]
    figures = {"time": by_time, "uplink": by_uplink, "speed": speeds}
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Without it a browser would ask the server for a favicon.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(results.title)}</title>",
            f"<style>{STYLE}</style></head><body><main>",
            *main,
            "<noscript>The plots need JavaScript; the table does not.</noscript></main>",
            foot(results),
            f'<script type="application/json" id="report-data">{_data(figures, heat)}</script>',
            f"<script>{plotly}</script>",
            f"<script>{SCRIPT}</script>",
            "</body></html>\n",
        ]
    )


def _data(figures: Mapping[str, Figure | None], heat: Heat | None) -> str:
    """Return what the script draws as JSON that cannot end the block it stands in."""
    plots = [
        {"id": f"plot-{name}", "traces": figure.traces, "layout": figure.layout}
        for name, figure in figures.items()
        if figure is not None
    ]
    values = None if heat is None else {"chosen": heat.chosen, **heat.values}
    text = json.dumps({"plots": plots, "heat": values}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
