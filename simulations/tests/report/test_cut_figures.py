"""Where the cut lay, which features were found, and what went up and down, as the page draws them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_elastic_simulations.report import write_page
from fl_elastic_simulations.report.cut_figures import cuts_by_time, found_by_time, row_of_cut
from fl_elastic_simulations.report.figures import accuracy_by_traffic
from fl_elastic_simulations.report.summary import read_summary

Make = Callable[..., dict[str, Any]]


def with_cuts(make_summary: Make) -> dict[str, Any]:
    """Two seeds of "elastic": the cut stays in one and moves down in the other; features from the start on."""
    summary = make_summary(("full", "elastic"), seeds=2, rounds=4)
    method = summary["methods"]["elastic"]
    method["cuts"] = [
        {"seed": 0, "simulated_seconds": 2.0, "group": "layer3"},
        {"seed": 1, "simulated_seconds": 1.0, "group": "fc"},
        {"seed": 1, "simulated_seconds": 20.0, "group": ""},
    ]
    for point in method["history"]:
        if point["round"]:
            # Computed once, found ever after; in seed 1 once more.
            again = 100 * (point["seed"] == 1 and point["round"] >= 3)
            point |= {
                "features_computed": 100 + again,
                "features_found": 100 * (point["round"] - 1) - again,
            }
    return summary


def test_stairs_show_the_deepest_group_that_was_trained(make_summary: Make) -> None:
    results = read_summary(with_cuts(make_summary))
    drawn = cuts_by_time(results)
    assert drawn is not None
    stays, moves = drawn["data"]
    depth = [round(y) for y in moves["y"]]
    assert depth == [0, 0, len(results.groups) - 1, len(results.groups) - 1]
    # The deepest of a module's groups counts.
    assert round(stays["y"][0]) == results.groups.index("layer3.0.conv1")
    assert moves["x"][1] == moves["x"][2] == pytest.approx(20.0)
    ends = [max(p.seconds or 0 for p in results.methods[1].history if p.seed == s) for s in (0, 1)]
    assert [stays["x"][-1], moves["x"][-1]] == pytest.approx(ends)
    assert {trace["legendgroup"] for trace in drawn["data"]} == {"1"}
    assert moves["customdata"][-1][0] == "everything is trained"


def test_found_is_a_share_of_what_was_met_since_the_test_before(make_summary: Make) -> None:
    drawn = found_by_time(read_summary(with_cuts(make_summary)))
    assert drawn is not None
    (line,) = drawn["data"]
    assert line["y"] == [0.0, 1.0, 0.5, 1.0]
    assert [row[1:] for row in line["customdata"]][:3] == [
        ["0", "200"],
        ["200", "0"],
        ["100", "100"],
    ]


def test_bytes_of_both_directions_are_added(make_summary: Make) -> None:
    summary = with_cuts(make_summary)
    drawn = accuracy_by_traffic(read_summary(summary))
    assert drawn is not None
    line = next(t for t in drawn["data"] if t.get("name") == "elastic")
    last = summary["methods"]["elastic"]["history"][-1]
    assert line["x"][-1] == pytest.approx((last["uplink_bytes"] + last["downlink_bytes"]) / 1e6)
    for method in summary["methods"].values():
        for point in method["history"]:
            del point["downlink_bytes"]
    assert accuracy_by_traffic(read_summary(summary)) is None


def test_without_a_cut_there_is_nothing_of_it(make_summary: Make, tmp_path: Path) -> None:
    summary = make_summary()
    results = read_summary(summary)
    assert cuts_by_time(results) is None and found_by_time(results) is None
    ids = [f'id="{name}"' for name in ("cuts", "features", "traffic")]
    page = write_page(summary, tmp_path / "none.html").read_text()
    assert not any(each in page for each in ids)
    page = write_page(with_cuts(make_summary), tmp_path / "cuts.html").read_text()
    assert all(each in page for each in ids) and "Rows below the fleet&#39;s cut are empty" in page


def test_a_cut_that_names_no_group_of_the_summary_is_drawn_at_the_bottom() -> None:
    assert row_of_cut("elsewhere", ["head", "stem"]) == 1
