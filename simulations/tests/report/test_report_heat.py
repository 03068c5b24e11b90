"""The maps of coverage: what is in their cells, which is shown first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fl_elastic_simulations.report.document import Section
from fl_elastic_simulations.report.page import write_page

Make = Callable[..., dict[str, Any]]
Cover = Callable[[dict[str, Any]], Section]


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> Cover:
    """Give the section of coverage on the page of a summary."""
    seen: list[Section] = []

    def keep(path: Path, template: str, *, sections: list[Section], **values: object) -> None:
        seen.extend(each for each in sections if each.name == "coverage")

    monkeypatch.setattr("fl_elastic_simulations.report.page.write_document", keep)

    def found(summary: dict[str, Any]) -> Section:
        write_page(summary, "nowhere")
        return seen.pop()

    return found


def maps(section: Section, panel: int) -> list[dict[str, Any]]:
    """Return the maps of one panel, a map per method, as plotly writes them."""
    drawn: list[dict[str, Any]] = json.loads(go.Figure(section.panels[panel].figure).to_json())[
        "data"
    ]
    return drawn


def test_cells_are_the_shares_with_groups_down(make_summary: Make, coverage: Cover) -> None:
    summary = make_summary(("full", "elastic"), rounds=5)
    section = coverage(summary)
    elastic = maps(section, 0)[1]
    zero = summary["methods"]["elastic"]["coverage"]["pi_zero_2w"]
    assert elastic["z"] == [[row[group] for row in zero] for group in range(12)]
    assert (elastic["x0"], elastic["dx"], elastic["meta"]) == (1, 1, summary["groups"])
    assert go.Figure(section.panels[0].figure).layout.xaxis.range == (0.5, 5.5)
    assert (
        section.panels[0].facts
        == "2 clients, slowdown 12\N{MULTIPLICATION SIGN}, asked for 2.5\N{MULTIPLICATION SIGN}"
    )


def test_the_last_method_that_is_not_full_is_shown_first(
    make_summary: Make, coverage: Cover
) -> None:
    for methods, chosen in (
        (("full", "elastic"), 1),
        (("elastic", "random", "full"), 1),
        (("full",), 0),
    ):
        section = coverage(make_summary(methods, rounds=2))
        assert section.chosen == chosen
        for panel in range(6):
            shown = [each["visible"] for each in maps(section, panel)]
            assert shown == [position == chosen for position in range(len(methods))]


def test_methods_and_classes_without_coverage_have_no_choice_and_no_panel(
    make_summary: Make, coverage: Cover
) -> None:
    summary = make_summary(("full", "elastic", "head"), rounds=2)
    summary["methods"]["head"]["coverage"] = {}
    for method in ("full", "elastic"):
        del summary["methods"][method]["coverage"]["laptop"]
    section = coverage(summary)
    assert (section.choices, section.chosen) == ({0: "full", 1: "elastic"}, 1)
    assert len(section.panels) == 5 and "Laptop" not in [each.title for each in section.panels]


def test_ragged_and_empty_coverage(coverage: Cover) -> None:
    entry = {"coverage": {"pi": [[1.0], [0.5, None]], "pc": []}}
    devices = [{"device": "pi"}, {"device": "pc"}]
    section = coverage({"groups": ["<fc>"], "devices": devices, "methods": {"elastic": entry}})
    (only,) = maps(section, 0)
    assert only["meta"] == ["&lt;fc&gt;", "group 1"]
    assert only["z"] == [[1.0, 0.5], [None, None]]
    assert coverage({"methods": {"full": {"coverage": {"pi": []}}}}).panels == ()


def test_many_groups_get_few_labels(make_summary: Make, coverage: Cover) -> None:
    summary = make_summary(("elastic",), rounds=2)
    summary["groups"] = [f"block{index}.conv" for index in range(200)]
    layout = go.Figure(coverage(summary).panels[0].figure).layout
    assert 8 <= len(layout.yaxis.ticktext) <= 16
    assert layout.height <= 420
