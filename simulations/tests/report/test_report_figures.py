"""The values that the line plots and the bars are drawn from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from fl_elastic_simulations.report.figures import (
    accuracy_by_round,
    accuracy_by_time,
    accuracy_by_uplink,
    speed_bars,
)
from fl_elastic_simulations.report.palette import ink
from fl_elastic_simulations.report.summary import read_summary

Make = Callable[..., dict[str, Any]]


def drawn(figure: Any) -> list[dict[str, Any]]:
    """Return the traces of a figure that must be there, as plotly writes them."""
    assert figure is not None
    return [dict(trace) for trace in json.loads(go.Figure(figure).to_json())["data"]]


def layout(figure: Any) -> Any:
    """Return the layout of a figure, as plotly reads it."""
    return go.Figure(figure).layout


def lines(figure: Any) -> list[dict[str, Any]]:
    """Return the traces that are curves and not bands."""
    return [trace for trace in drawn(figure) if "fill" not in trace and "text" not in trace]


def test_one_line_per_method_in_its_colour(make_summary: Make) -> None:
    results = read_summary(make_summary(("full", "elastic", "head")))
    for figure in (accuracy_by_time(results), accuracy_by_uplink(results)):
        assert [trace["name"] for trace in lines(figure)] == ["full", "elastic", "head"]
        assert [trace["line"]["color"] for trace in lines(figure)] == [
            ink(position).colour for position in range(3)
        ]


def test_rounds_are_an_axis_of_their_own(make_summary: Make) -> None:
    results = read_summary(make_summary(("full",), seeds=1, rounds=4))
    (line,) = lines(accuracy_by_round(results))
    assert line["x"] == [0, 1, 2, 3, 4]


def test_values_are_in_the_unit_that_the_axis_names() -> None:
    history = [
        {"seed": 0, "round": index, "accuracy": 0.5, "simulated_seconds": 600 * index}
        | {"uplink_bytes": 3_000_000 * index}
        for index in range(3)
    ]
    results = read_summary({"methods": {"full": {"history": history}}})
    time, uplink = accuracy_by_time(results), accuracy_by_uplink(results)
    assert time is not None and uplink is not None
    assert lines(time)[0]["x"] == [0, 10, 20]
    assert lines(uplink)[0]["x"] == [0, 3, 6]
    assert "simulated time (min)" in str(layout(time)["xaxis"])
    assert "uplink (MB)" in str(layout(uplink)["xaxis"])


def test_a_band_spans_the_seeds_and_one_seed_has_none(make_summary: Make) -> None:
    summary = make_summary(("full",), seeds=3, rounds=4)
    bands = [t for t in drawn(accuracy_by_time(read_summary(summary))) if "fill" in t]
    last = [p["accuracy"] for p in summary["methods"]["full"]["history"] if p["round"] == 4]
    assert len(bands) == 1
    assert (bands[0]["y"][4], bands[0]["y"][5]) == (min(last), max(last))
    single = accuracy_by_time(read_summary(make_summary(("full",), seeds=1, rounds=4)))
    assert [trace for trace in drawn(single) if "fill" in trace] == []


def test_the_target_is_drawn_only_where_there_is_one(make_summary: Make) -> None:
    summary = make_summary(("full",), rounds=3)
    figure = accuracy_by_time(read_summary(summary))
    assert figure is not None
    assert [(shape.y0, shape.y1) for shape in layout(figure).shapes] == [(0.935, 0.935)]
    assert layout(figure).annotations[0].text == "target 93.5 %"
    without = accuracy_by_time(read_summary({**summary, "target_accuracy": None}))
    assert without is not None
    assert not layout(without).shapes and not layout(without).annotations


def test_the_axis_is_that_of_what_differs(
    make_summary: Make,
) -> None:
    summary = make_summary(("full", "elastic"), seeds=1, rounds=40)
    results = read_summary(summary)
    figure = accuracy_by_time(results)
    low, high = layout(figure).yaxis.range
    ends = [line["y"][-1] for line in lines(figure)]
    early = [line["y"][0] for line in lines(figure)]
    # A run rises from a tenth; what is compared lies between 90 and 97 %.
    assert max(early) < low < 0.935 < high and high - low < 0.4
    assert all(low < end < high for end in ends)


def test_no_history_gives_no_figure() -> None:
    results = read_summary({"methods": {"full": {"history": []}}})
    assert accuracy_by_time(results) is None
    assert accuracy_by_uplink(results) is None
    assert speed_bars(results) is None


def test_bars_hold_what_was_asked_and_what_was_achieved(make_summary: Make) -> None:
    summary = make_summary(("full", "elastic"), rounds=3)
    asked, achieved = drawn(speed_bars(read_summary(summary)))[2:]
    speeds = summary["methods"]["elastic"]["devices"].values()
    assert asked["x"] == [speed["requested_speedup"] for speed in speeds]
    assert achieved["x"] == [speed["achieved_speedup"] for speed in speeds]
    assert achieved["marker"]["color"] == ink(1).colour


def test_bars_of_one_class_do_not_overlap(make_summary: Make) -> None:
    methods = ("full", "elastic", "random", "head")
    frames = drawn(speed_bars(read_summary(make_summary(methods, rounds=3))))[::2]
    edges = sorted(
        (place - frame["width"] / 2, place + frame["width"] / 2)
        for frame in frames
        for place in frame["y"]
    )
    assert len(edges) == 4 * 6
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(edges))


def test_names_are_escaped_for_the_text_of_plotly() -> None:
    history = [{"seed": 0, "round": 1, "accuracy": 0.5, "simulated_seconds": 1.0}]
    entry = {"history": history, "devices": {"<b>pi</b>": {"achieved_speedup": 1.0}}}
    devices = [{"device": "<b>pi</b>"}]
    results = read_summary({"devices": devices, "methods": {"<a href='x'>": entry}})
    assert lines(accuracy_by_time(results))[0]["name"] == "&lt;a href='x'&gt;"
    bars = speed_bars(results)
    assert bars is not None
    assert "&lt;b&gt;pi&lt;/b&gt;" in str(layout(bars))
