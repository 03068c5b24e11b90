"""The page of a stream: drawn from its summary, nothing that a label or name could break."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import plotly.graph_objects as go
import pytest

from fl_elastic_simulations.report.document import marks
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
         "stored": {"0": 5, "10": 2, "2": 3, "-1": 4, "none": 1}},
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
    found: dict[str, Any] = json.loads(go.Figure(figure).to_json())
    return found


def pictures(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", html, re.S)]


def test_the_page_holds_three_drawings_and_no_script(tmp_path: Path) -> None:
    html = write_stream_page(summary(), tmp_path / "report.html").read_text()
    assert "<script" not in html and "<button" not in html and "script-src" not in html
    assert "http" not in html.replace('http-equiv="Content', "")
    # A device writes it beside its state: disks that are small wear out.
    assert len(html) < 20_000
    assert "120 samples, 100 with a label, 2 refused; accuracy of late 90.0 %" in html
    assert "1 drifts; 2 adaptations, 1 of them undone; a store of 2.05 kB." in html
    assert "<dd>&lt;3</dd>" in html and "<head>" not in html.split("</head>")[1]
    accuracy, trained, store = pictures(html)
    assert len([each for each in accuracy if each.get("class") == "mark"]) == 1
    assert [each.findtext("title") for each in trained.findall("rect")] == [
        "conv1", "<head>", "<head>",
    ]  # fmt: skip
    fills = [each.get("fill") for each in trained.findall("rect")]
    assert fills[0] == fills[1] != fills[2]
    for drawing, up in ((accuracy, "accuracy"), (trained, None), (store, "samples in the store")):
        texts = [each.text for each in drawing.findall("text")]
        assert "labelled samples" in texts and (up is None or up in texts)
    titles = [each.findtext("title") for each in store.findall("polygon")]
    assert titles == ["no label", "class -1", "class 0", "class 2", "class 10"]
    for name in titles:
        assert f"</span>{name}</span>" in html


def test_a_drawn_line_goes_through_its_shares() -> None:
    figure = shares_along({"<a>": [(0, 0.0), (10, 1.0), (20, 1.0)]}, [5])
    found = marks(figure)
    ((path, _, fill, name),) = found["paths"]
    (x0, y0), (x1, y1), _ = [tuple(map(float, pair.split(","))) for pair in path.split()]
    assert ((x1 - x0) * 2, y0 - y1) == (640 - 46 - 12, figure["layout"]["height"] - 30 - 10)
    assert found["dashed"] == [pytest.approx((x0 + x1) / 2, abs=0.1)]
    assert (name, fill) == ("<a>", "")
    assert [text for _, text in found["rows"]] == ["0 %", "25 %", "50 %", "75 %", "100 %"]


def test_drawn_areas_stand_on_each_other() -> None:
    points = [
        {"labelled": at, "accuracy": 1.0, "stored": stored}
        for at, stored in ((0, {"0": 1}), (1, {"0": 1, "1": 3}))
    ]
    *_, store = stream_sections(summary(points=points))
    lower, upper = (path.split() for path, *_ in marks(store.figure)["paths"])
    # The lower edge of the second is the upper edge of the first.
    assert upper[2:] == list(reversed(lower[:2]))
    # Four samples are the whole height.
    assert float(upper[1].split(",")[1]) == 10


def test_drawn_cells_lie_in_the_row_of_their_name_and_never_over_each_other() -> None:
    _, trained, _ = stream_sections(summary())
    found = marks(trained.figure)
    rows = {text: place for place, text in found["rows"]}
    assert [name for *_, name in found["cells"]] == ["conv1", "<head>", "<head>"]
    for left, top, width, height, _, name in found["cells"]:
        assert top < rows[name] < top + height and width > 0 and left >= found["left"]
    first, second = found["cells"][1:]
    assert first[0] + first[2] <= second[0]


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    hostile = summary(environment={HOSTILE: HOSTILE}, groups=["conv1", HOSTILE])
    before = write_stream_page(summary(), tmp_path / "plain.html").read_text()
    after = write_stream_page(hostile, tmp_path / "hostile.html").read_text()
    assert after.count("<script") == before.count("<script")
    assert after.count("</script") == before.count("</script") == 0
    assert pictures(after)[1].findall("rect")[-1].findtext("title") == HOSTILE


def test_a_stream_without_labels_has_nothing_to_draw(tmp_path: Path) -> None:
    (only,) = stream_sections(summary(points=[]))
    assert "nothing to draw" in only.guide and only.figure is None
    page = write_stream_page(summary(points=[]), tmp_path / "report.html").read_text()
    assert "nothing to draw" in page and "<svg" not in page


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
    assert [each["y"] for each in traces] == [[0, 1], [0, 4], [5, 5], [0, 3], [0, 2]]
    assert list(store.names) == ["no label", "class -1", "class 0", "class 2", "class 10"]


def test_classes_beyond_the_colours_are_still_told_apart() -> None:
    points = [{"labelled": 5, "accuracy": 1.0, "stored": {str(label): 1 for label in range(14)}}]
    *_, store = stream_sections(summary(points=points))
    assert len({each["fillcolor"] for each in drawn(store.figure)["data"]}) == 14


def test_a_device_does_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert len(pictures(write_stream_page(summary(), tmp_path / "report.html").read_text())) == 3
