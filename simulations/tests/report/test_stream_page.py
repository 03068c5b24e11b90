"""The page of a stream: drawn from its summary, nothing that a label or name could break."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fl_elastic_simulations.report.stream_page import (
    shares_along,
    stream_sections,
    write_stream_page,
)

HOSTILE = "</script><script>hurt()</script>"


def summary(**changed: Any) -> dict[str, Any]:
    points = [
        {"labelled": 50, "accuracy": 0.5, "samples": 50, "store_bytes": 10, "stored": {"0": 5}},
        {"labelled": 100, "accuracy": 1.0, "samples": 50, "store_bytes": 20,
         "stored": {"0": 5, "10": 2, "2": 3, "-1": 1}},
    ]  # fmt: skip
    found = {
        "environment": {"python": "<3"}, "observed": 120, "labelled": 100, "accuracy": 0.75,
        "prequential_accuracy": 0.9, "refused": {"a number is not finite": 2}, "drifts": 1,
        "adaptations": 2, "rolled_back": 1, "store_bytes": 2048, "drift_marks": [60],
        "points": points, "groups": ["conv1", "<head>"],
        "adapted": [
            {"at": 40, "undone": "", "trained": [0, 1]}, {"at": 80, "undone": "worse", "trained": [1]},
        ],
    }  # fmt: skip
    return found | changed


def drawn(figure: Any) -> dict[str, Any]:
    """Return a figure as plotly writes it."""
    found: dict[str, Any] = json.loads(figure.to_json())
    return found


@pytest.fixture(autouse=True)
def light_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a comment in the place of the five megabytes of plotly.js."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")


def test_the_page_holds_three_figures_and_asks_nobody(tmp_path: Path) -> None:
    html = write_stream_page(summary(), tmp_path / "report.html").read_text()
    assert html.count("<script") == html.count("</script>") == 3
    assert "http" not in html.replace('http-equiv="Content', "")
    assert "120 samples, 100 with a label, 2 refused; accuracy of late 90.0 %" in html
    assert "1 drifts; 2 adaptations, 1 of them undone; a store of 2.05 kB." in html
    assert "<dd>&lt;3</dd>" in html and "<head>" not in html.split("</head>")[1]
    figures = json.loads(html.partition('id="figures">')[2].partition("</script>")[0])
    assert list(figures) == ["plot-stream-accuracy", "plot-stream-trained", "plot-stream-store"]
    assert re.findall(r'class="plot" id="([^"]+)"', html) == list(figures)
    accuracy, trained, store = figures.values()
    assert [mark["x0"] for mark in accuracy["layout"]["shapes"]] == [60]
    assert (accuracy["data"][0]["x"], accuracy["data"][0]["y"]) == ([50, 100], [0.5, 1.0])
    assert trained["data"][0]["meta"] == ["conv1", "&lt;head&gt;"]
    assert [each["name"] for each in store["data"]] == [
        "no label", "class 0", "class 2", "class 10",
    ]  # fmt: skip


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    hostile = summary(environment={HOSTILE: HOSTILE}, groups=["conv1", HOSTILE])
    before = write_stream_page(summary(), tmp_path / "plain.html").read_text()
    after = write_stream_page(hostile, tmp_path / "hostile.html").read_text()
    assert after.count("<script") == before.count("<script")
    assert after.count("</script") == before.count("</script")


def test_a_stream_without_labels_has_nothing_to_draw(tmp_path: Path) -> None:
    (only,) = stream_sections(summary(points=[]))
    assert "nothing to draw" in only.guide and only.figure is None
    page = write_stream_page(summary(points=[]), tmp_path / "report.html").read_text()
    assert "nothing to draw" in page and 'class="plot"' not in page


def test_before_the_first_adaptation_nothing_was_trained() -> None:
    _, trained, _ = stream_sections(summary(adapted=[]))
    assert drawn(trained.figure)["data"] == []
    assert len(stream_sections(summary(adapted=[], groups=[]))) == 2


def test_a_model_of_many_groups_shares_rows() -> None:
    groups = [f"layer{place}" for place in range(240)]
    adapted = [{"at": 10, "undone": "", "trained": list(range(240))}]
    _, trained, _ = stream_sections(summary(groups=groups, adapted=adapted))
    (cells,) = drawn(trained.figure)["data"]
    assert cells["z"] == [[1]] * 60
    assert cells["meta"] == groups[::4]


def test_what_was_undone_has_another_colour_and_gaps_have_none() -> None:
    _, trained, _ = stream_sections(summary())
    (cells,) = drawn(trained.figure)["data"]
    assert cells["z"] == [[1, None, None], [1, None, 0]]
    # From each adaptation on, as wide as four fifths of its part of the stream, never into the next.
    assert cells["x"] == [40, 80, 80, 120]
    (_, undone), (_, kept) = cells["colorscale"]
    assert undone != kept


def test_a_line_goes_through_its_shares() -> None:
    figure = drawn(shares_along({"a": [(0, 0.0), (10, 1.0)], "b": [(5, 0.5)]}))
    assert [(each["x"], each["y"]) for each in figure["data"]] == [([0, 10], [0, 1]), ([5], [0.5])]
    assert figure["layout"]["yaxis"]["range"] == [0, 1]


def test_counts_stand_on_each_other_and_a_class_to_come_counts_nothing() -> None:
    *_, store = stream_sections(summary())
    traces = drawn(store.figure)["data"]
    assert {each["stackgroup"] for each in traces} == {"all"}
    assert [each["y"] for each in traces] == [[0, 1], [5, 5], [0, 3], [0, 2]]
    assert list(store.names) == ["no label", "class 0", "class 2", "class 10"]


def test_classes_beyond_the_colours_are_still_told_apart() -> None:
    points = [{"labelled": 5, "accuracy": 1.0, "stored": {str(label): 1 for label in range(14)}}]
    *_, store = stream_sections(summary(points=points))
    assert len({each["fillcolor"] for each in drawn(store.figure)["data"]}) == 14
