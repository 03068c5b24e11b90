"""The script of the page: draws the plots in the reader's colours and answers to the buttons."""

from __future__ import annotations

__all__ = ["SCRIPT"]

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
