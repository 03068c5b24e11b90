"""Pieces of the page as HTML; every text that comes from the summary is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fl_elastic_simulations.report.figures import Figure
from fl_elastic_simulations.report.formats import factor_text
from fl_elastic_simulations.report.heat import Heat
from fl_elastic_simulations.report.palette import ink
from fl_elastic_simulations.report.summary import DeviceClass, Method, Results
from fl_elastic_simulations.report.table import results_grid, target_sentence

__all__ = ["coverage_section", "foot", "heading", "plot_section", "table_section"]


def heading(results: Results) -> str:
    """Return the title and the paragraph on the setting."""
    times = (
        "All times are <strong>simulated</strong>: computed from measured step costs and each "
        "device's slowdown and link, not waited for."
        if results.simulated
        else "All times are measured."
    )
    return f"<header><h1>{escape(results.title)}</h1><p>{_setting(results)} {times}</p></header>"


def _setting(results: Results) -> str:
    """Return one sentence made of the parts that the summary knows."""
    clients = results.clients or sum(device.count or 0 for device in results.devices)
    who = _counted(clients, "client") if clients else "Clients"
    parts = [
        f"{who} of {_counted(len(results.devices), 'device class', 'es')}"
        if results.devices
        else who,
        f"train {escape(results.model) or 'one model'}",
        f"on {escape(results.dataset)}" if results.dataset else "",
        f"for {_counted(results.rounds, 'round')}" if results.rounds else "",
        f"with {_counted(len(results.seeds), 'seed')}" if results.seeds else "",
    ]
    return " ".join(part for part in parts if part) + "."


def table_section(results: Results) -> str:
    """Return the results table in a box of its own, which scrolls where the screen is narrow."""
    grid = results_grid(results)
    head = "".join(f'<th scope="col">{_unbroken(text)}</th>' for text in grid.headings)
    body = "".join(
        f'<tr><th scope="row" title="{escape(name)}">{_dot(position)}{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for position, (name, *cells) in enumerate(grid.rows)
    )
    return (
        '<section id="results"><h2>Results</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Results table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="note">{escape(target_sentence(results))}</p></section>'
    )


def plot_section(
    name: str, title: str, guide: str, figure: Figure | None, methods: Sequence[Method]
) -> str:
    """Return a section with one plot and its legend, or with a note where there is no plot."""
    if figure is None:
        return _section(name, title, "The summary holds nothing to draw here.", "")
    content = (
        _legend(methods)
        + f'<div class="plot" id="plot-{name}" role="img" aria-label="{escape(title)}" '
        f'style="height:{figure.height}px"></div>'
    )
    return _section(name, title, guide, content)


def coverage_section(results: Results, heat: Heat | None) -> str:
    """Return the section of the heat maps, with one choice per method that has coverage."""
    title = "What each device class trained"
    if heat is None:
        return _section("coverage", title, "The summary holds no coverage.", "")
    guide = (
        "Each cell is one tensor group in one round: the stronger its colour, the larger the share "
        "of that class's clients that trained it. The top row is the group next to the loss."
    )
    choices = "".join(
        f'<label style="--method:{ink(position).colour}"><input type="radio" name="covered" '
        f'value="{position}"{" checked" if position == heat.chosen else ""}>'
        f"{_dot(position)}{escape(results.methods[position].name)}</label>"
        for position in heat.methods
    )
    panels = "".join(
        f"<figure><figcaption>{escape(device.label)}<small>{_facts(device)}</small></figcaption>"
        f'<div class="plot" id="heat-{index}" role="img" '
        f'aria-label="Coverage of {escape(device.label)}" style="height:{heat.height}px">'
        "</div></figure>"
        for index, device in enumerate(heat.devices)
    )
    content = (
        f'<fieldset class="chips"><legend class="hidden">Method</legend>{choices}</fieldset>'
        '<div class="scale"><span>no client</span><i></i><span>all of its clients</span></div>'
        f'<div class="panels">{panels}</div>'
    )
    return _section("coverage", title, guide, content)


def foot(results: Results) -> str:
    """Return seeds, versions, machine and date."""
    facts = dict(results.environment)
    if results.seeds:
        facts = {"seeds": ", ".join(map(str, results.seeds)), **facts}
    entries = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items()
    )
    return f"<footer>Written by fl_elastic.<dl>{entries}</dl></footer>"


def _section(name: str, title: str, guide: str, content: str) -> str:
    return (
        f'<section id="{name}"><h2>{escape(title)}</h2><p class="guide">{escape(guide)}</p>'
        f"{content}</section>"
    )


def _legend(methods: Iterable[Method]) -> str:
    """Return one button per method; pressing it hides the method in every plot."""
    buttons = "".join(
        f'<button type="button" data-method="{position}" aria-pressed="true" '
        f'style="--method:{ink(position).colour}">{_dot(position)}{escape(method.name)}</button>'
        for position, method in enumerate(methods)
    )
    return f'<div class="chips legend">{buttons}</div>'


def _unbroken(heading: str) -> str:
    """Escape a heading, with hyphens at which no line ends."""
    return escape(heading).replace("-", "&#8209;")


def _dot(position: int) -> str:
    style = ink(position)
    shape = "dot" if style.dash == "solid" else "dot dash"
    return f'<span class="{shape}" style="--method:{style.colour}"></span>'


def _facts(device: DeviceClass) -> str:
    parts = [
        "" if device.count is None else _counted(device.count, "client"),
        "" if device.slowdown is None else f"slowdown {factor_text(device.slowdown)}",
        ""
        if device.requested_speedup is None
        else f"asked for {factor_text(device.requested_speedup)}",
    ]
    return ", ".join(part for part in parts if part)


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
