"""The page of a stream: drawn from its summary, nothing that a label or name could break."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fl_elastic_simulations.report.stream_page import Drawing, stream_sections, write_stream_page

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


def points_of(shape: ElementTree.Element) -> list[tuple[float, float]]:
    found = [pair.split(",") for pair in str(shape.get("points")).split()]
    return [(float(x), float(y)) for x, y in found]


def test_a_drawn_line_goes_through_its_shares(tmp_path: Path) -> None:
    points = [
        {"labelled": at, "accuracy": share, "stored": {}}
        for at, share in ((0, 0), (10, 1), (20, 1))
    ]
    found = summary(points=points, drift_marks=[5])
    drawing, *_ = pictures(write_stream_page(found, tmp_path / "report.html").read_text())
    (line,) = drawing.findall("polyline")
    (x0, y0), (x1, y1), _ = points_of(line)
    assert ((x1 - x0) * 2, y0 - y1) == (640 - 46 - 12, 300 - 30 - 10)
    (mark,) = [each for each in drawing.findall("line") if each.get("class") == "mark"]
    assert float(str(mark.get("x1"))) == pytest.approx((x0 + x1) / 2, abs=0.1)
    texts = [each.text for each in drawing.findall("text")]
    assert texts[:5] == ["0 %", "25 %", "50 %", "75 %", "100 %"]


def test_drawn_areas_stand_on_each_other(tmp_path: Path) -> None:
    points = [
        {"labelled": at, "accuracy": 1.0, "stored": stored}
        for at, stored in ((0, {"0": 1}), (1, {"0": 1, "1": 3}))
    ]
    *_, drawing = pictures(
        write_stream_page(summary(points=points), tmp_path / "report.html").read_text()
    )
    lower, upper = map(points_of, drawing.findall("polygon"))
    # The lower edge of the second is the upper edge of the first.
    assert upper[2:] == list(reversed(lower[:2]))
    # Four samples are the whole height.
    assert upper[1][1] == 10


def test_blocks_lie_in_the_row_of_their_name_and_never_over_each_other() -> None:
    _, trained, _ = stream_sections(summary())
    drawing = trained.figure
    assert isinstance(drawing, Drawing)
    assert [text for _, text in drawing.rows] == ["conv1", "<head>"]
    # From each adaptation on, as wide as four fifths of its part of the stream, never into the next.
    assert [(*edges, row, name) for *edges, row, _, name in drawing.blocks] == [
        (40, 80, 0, "conv1"), (40, 80, 1, "<head>"), (80, 120, 1, "<head>"),
    ]  # fmt: skip
    kept, _, undone = [colour for *_, colour, _ in drawing.blocks]
    assert undone != kept


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
    assert isinstance(trained.figure, Drawing) and trained.figure.blocks == []
    assert len(stream_sections(summary(adapted=[], groups=[]))) == 2


def test_a_model_of_many_groups_shares_rows() -> None:
    groups = [f"layer{place}" for place in range(240)]
    adapted = [{"at": 10, "undone": "", "trained": list(range(240))}]
    _, trained, _ = stream_sections(summary(groups=groups, adapted=adapted))
    assert isinstance(trained.figure, Drawing)
    assert [name for *_, name in trained.figure.blocks] == groups[::4]


def test_classes_beyond_the_colours_are_still_told_apart() -> None:
    points = [{"labelled": 5, "accuracy": 1.0, "stored": {str(label): 1 for label in range(14)}}]
    *_, store = stream_sections(summary(points=points))
    assert isinstance(store.figure, Drawing)
    assert len({fill for _, _, fill, _ in store.figure.lines}) == 14


def test_a_device_does_without_plotly_and_pandas(tmp_path: Path) -> None:
    code = (
        "import json, sys, pathlib\n"
        "from fl_elastic_simulations.report.stream_page import write_stream_page\n"
        "write_stream_page(json.load(sys.stdin), pathlib.Path('report.html'))\n"
        "assert not {'pandas', 'plotly'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(summary()),
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert len(pictures((tmp_path / "report.html").read_text())) == 3
