"""The page of a stream: drawn from its summary, no script, nothing that a label or name could break."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fl_elastic_simulations.report.drawing import areas, cells, lines
from fl_elastic_simulations.report.stream_page import stream_sections, write_stream_page


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


def drawings(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", html, re.S)]


def test_the_page_holds_three_drawings_and_no_script(tmp_path: Path) -> None:
    html = write_stream_page(summary(), tmp_path / "report.html").read_text()
    assert "<script" not in html
    assert "http" not in html.replace('http-equiv="Content', "")
    assert "120 samples, 100 with a label, 2 refused; accuracy of late 90.0 %" in html
    assert "&lt;head&gt;" in html
    assert "<head>" not in html.split("</head>")[1]
    accuracy, trained, store = drawings(html)
    assert len([each for each in accuracy if each.get("class") == "mark"]) == 1
    assert len(trained.findall("rect")) == 3
    titles = [each.findtext("title") for each in store.findall("polygon")]
    assert titles == ["no label", "class 0", "class 2", "class 10"]


def test_a_stream_without_labels_has_nothing_to_draw() -> None:
    (only,) = stream_sections(summary(points=[]))
    assert "nothing to draw" in only


def test_a_model_of_many_groups_shares_rows() -> None:
    groups = [f"layer{place}" for place in range(240)]
    adapted = [{"at": 10, "undone": "", "trained": list(range(240))}]
    html = "\n".join(stream_sections(summary(groups=groups, adapted=adapted)))
    assert len(drawings(html)[1].findall("rect")) == 60


def test_a_line_goes_through_its_shares() -> None:
    (line,) = drawings(lines({"a": [(0, 0.0), (10, 1.0)]}, 20, label=""))
    places = [
        tuple(map(float, pair.split(","))) for pair in line.find("polyline").get("points").split()
    ]
    (x0, y0), (x1, y1) = places
    assert (x1 - x0) * 2 == 640 - 46 - 12
    assert y0 - y1 == 240 - 30 - 10


def test_areas_stand_on_each_other() -> None:
    (drawn,) = drawings(areas({"a": [(0, 1.0), (1, 1.0)], "b": [(1, 3.0)]}, 1, label=""))
    lower, upper = (each.get("points").split() for each in drawn.findall("polygon"))
    # The lower edge of the second is the upper edge of the first.
    assert upper[2:] == list(reversed(lower[:2]))


def test_cells_undone_are_pale() -> None:
    (drawn,) = drawings(cells(["a"], [(0, [0], False), (5, [0], True)], 10, label=""))
    first, second = drawn.findall("rect")
    assert first.get("fill") != second.get("fill")
