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


def test_the_last_override_wins() -> None:
    assert apply_overrides({}, ["a.b=1", "a.b=2"], []) == {"a": {"b": 2}}


@pytest.mark.parametrize(
    ("override", "table"),
    [
        ("methods=full", {"methods": ["full"]}),
        ("seeds=4", {"seeds": [4]}),
        ("title=a", {"title": "a"}),
    ],
)
def test_one_value_is_enough_where_a_list_is_wanted(override: str, table: dict[str, Any]) -> None:
    assert apply_overrides({}, [override], []) == table


def test_spaces_around_key_and_value_do_not_matter() -> None:
    assert apply_overrides({}, [" training.rounds = 5 "], []) == {"training": {"rounds": 5}}


def test_an_equals_sign_may_be_part_of_the_value() -> None:
    assert apply_overrides({}, ["title=a=b"], []) == {"title": "a=b"}
