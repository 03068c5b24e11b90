"""Overrides: TOML values, or bare words and comma lists, set at a dotted place."""

from __future__ import annotations

from typing import Any

import pytest

from fl_elastic_simulations.scenario.overrides import apply_overrides, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.1", 0.1),
        ("1e-3", 1e-3),
        ("true", True),
        ("elastic", "elastic"),
        ('"full"', "full"),
        ("'a, b'", "a, b"),
        ("full,elastic", ["full", "elastic"]),
        ("full, elastic,", ["full", "elastic"]),
        ("0,1", [0, 1]),
        ("[1, 2]", [1, 2]),
        ('["a", "b"]', ["a", "b"]),
        ("torchvision:resnet18", "torchvision:resnet18"),
        ("1\nother = 2", "1\nother = 2"),
        ("[1, 2", "[1, 2"),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_values_are_set_without_changing_the_original() -> None:
    table = {"training": {"rounds": 1}, "fleet": [{"count": 1}, {"count": 2}]}
    problems: list[str] = []
    changed = apply_overrides(
        table, ["training.rounds=5", "fleet.1.count=9", "method.elastic.codec=fp16"], problems
    )
    assert problems == []
    assert changed == {
        "training": {"rounds": 5},
        "fleet": [{"count": 1}, {"count": 9}],
        "method": {"elastic": {"codec": "fp16"}},
    }
    assert table == {"training": {"rounds": 1}, "fleet": [{"count": 1}, {"count": 2}]}


@pytest.mark.parametrize(
    ("overrides", "table"),
    [
        (["a.b=1", "a.b=2"], {"a": {"b": 2}}),
        # One value is enough where a list is wanted.
        (["methods=full"], {"methods": ["full"]}),
        (["seeds=4"], {"seeds": [4]}),
        (["title=a"], {"title": "a"}),
        ([" training.rounds = 5 "], {"training": {"rounds": 5}}),
        (["title=a=b"], {"title": "a=b"}),
    ],
    ids=["the last wins", "list", "list of numbers", "text", "spaces", "equals sign"],
)
def test_what_overrides_mean(overrides: list[str], table: dict[str, Any]) -> None:
    assert apply_overrides({}, overrides, []) == table
