"""Windows of channels: where they start, and how often each unit is in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from window_units import kept_units

from fl_elastic.errors import PlanError
from fl_elastic.groups.graph import Width
from fl_elastic.methods.windows.windows import Windows, window_starts

SIZES = [(n, w) for n in (1, 2, 5, 8, 12, 64) for w in range(1, n + 1)]


def width_of(size: int, name: str = "a") -> Width:
    return Width(name, size, 1, (name,), (), (), (), ())


def inclusion(size: int, length: int) -> Any:
    """The probability with which a window holds each unit, by going through all starts."""
    starts = window_starts(size, length).tolist()
    held = np.zeros(size)
    for start in starts:
        held[kept_units(size, length, start)] += 1
    return held / len(starts)


@pytest.mark.parametrize(("size", "length"), SIZES)
def test_all_units_are_held_equally_often(size: int, length: int) -> None:
    np.testing.assert_allclose(inclusion(size, length), length / size)


def test_drawn_starts_are_as_likely_as_they_are_said_to_be() -> None:
    width = width_of(6)
    windows = Windows((width,), 0.5, seed=5)
    drawn = np.zeros(6)
    for step in range(4000):
        drawn[kept_units(6, windows.length(width), windows.starts(step)["a"])] += 1
    np.testing.assert_allclose(drawn / 4000, 0.5, atol=0.03)


def test_widths_are_drawn_apart_and_again_from_the_same_seed() -> None:
    widths = (width_of(64, "a"), width_of(64, "b"))
    one, other = (Windows(widths, 0.25, seed=3) for _ in range(2))
    starts = [one.starts(step) for step in range(8)]
    assert starts == [other.starts(step) for step in range(8)]
    assert len({start["a"] for start in starts}) > 3
    assert any(start["a"] != start["b"] for start in starts)
    assert starts != [Windows(widths, 0.25, seed=4).starts(step) for step in range(8)]


def test_windows_of_a_fit_stay() -> None:
    width = width_of(10)
    lasting = Windows((width,), 0.5, every="fit", seed=1)
    assert len({lasting.starts(step)["a"] for step in range(20)}) == 1


@pytest.mark.parametrize(
    "settings",
    [{"rate": 0.0}, {"rate": 1.1}, {"every": "round"}],
)
def test_impossible_windows_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"must|unknown|drawn"):
        Windows((), **({"rate": 0.5} | settings))
