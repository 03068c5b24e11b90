"""The values that the heat maps are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_elastic_simulations.report.heat import coverage_heat
from fl_elastic_simulations.report.summary import read_summary

Make = Callable[..., dict[str, Any]]


def test_cells_are_the_shares_with_groups_down(make_summary: Make) -> None:
    summary = make_summary(("full", "elastic"), rounds=5)
    heat = coverage_heat(read_summary(summary))
    assert heat is not None
    shares: Any = heat.values["shares"]
    zero = summary["methods"]["elastic"]["coverage"]["pi_zero_2w"]
    assert shares[1][0] == [[row[group] for row in zero] for group in range(12)]
    assert heat.values["rounds"] == 5


def test_the_last_method_that_is_not_full_is_shown_first(make_summary: Make) -> None:
    for methods, chosen in (
        (("full", "elastic"), 1),
        (("elastic", "random", "full"), 1),
        (("full",), 0),
    ):
        heat = coverage_heat(read_summary(make_summary(methods, rounds=2)))
        assert heat is not None
        assert heat.chosen == chosen


def test_methods_and_classes_without_coverage_have_no_choice_and_no_panel(
    make_summary: Make,
) -> None:
    summary = make_summary(("full", "elastic", "head"), rounds=2)
    summary["methods"]["head"]["coverage"] = {}
    for method in ("full", "elastic"):
        del summary["methods"][method]["coverage"]["laptop"]
    heat = coverage_heat(read_summary(summary))
    assert heat is not None
    assert (heat.methods, heat.chosen) == ((0, 1), 1)
    assert "laptop" not in [device.name for device in heat.devices]


def test_ragged_and_empty_coverage() -> None:
    entry = {"coverage": {"pi": [[1.0], [0.5, None]], "pc": []}}
    heat = coverage_heat(read_summary({"groups": ["<fc>"], "methods": {"elastic": entry}}))
    assert heat is not None
    assert heat.values["groups"] == ["&lt;fc&gt;", "group 1"]
    assert heat.values["shares"] == [[[[1.0, 0.5], [None, None]]]]
    assert coverage_heat(read_summary({"methods": {"full": {"coverage": {"pi": []}}}})) is None


def test_many_groups_get_few_labels(make_summary: Make) -> None:
    summary = make_summary(("elastic",), rounds=2)
    summary["groups"] = [f"block{index}.conv" for index in range(200)]
    heat = coverage_heat(read_summary(summary))
    assert heat is not None
    ticks: Any = heat.values["ticktext"]
    assert 8 <= len(ticks) <= 16
    assert heat.height <= 420
