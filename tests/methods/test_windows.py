"""Windows of channels: where they start, and how often each unit is in one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fl_elastic.errors import PlanError
from fl_elastic.groups.graph import Width
from fl_elastic.methods.windows.windows import PLACES, Windows, inclusion, kept_units, window_starts

SIZES = [(n, w) for n in (1, 2, 5, 8, 12, 64) for w in range(1, n + 1)]


def width_of(size: int, name: str = "a") -> Width:
    return Width(name, size, 1, (name,), (), (), (), ())


@pytest.mark.parametrize(("size", "length"), SIZES)
def test_units_at_the_edges_of_uniform_windows_are_held_less_often(size: int, length: int) -> None:
    starts = size - length + 1
    for unit, found in enumerate(inclusion(size, length, "uniform").tolist()):
        assert found == pytest.approx(min(unit + 1, size - unit, length, starts) / starts)


@pytest.mark.parametrize("place", ["grid", "wrap"])
@pytest.mark.parametrize(("size", "length"), SIZES)
def test_all_units_are_held_equally_often_where_windows_wrap(
    place: Any, size: int, length: int
) -> None:
    np.testing.assert_allclose(inclusion(size, length, place), length / size)


def test_windows_of_a_grid_are_in_one_piece_where_the_length_divides_the_size() -> None:
    for size, length in SIZES:
        ends = window_starts(size, length, "grid") + length
        assert (ends <= size).all() == (size % length == 0 or length >= size)


def test_the_published_example() -> None:
    held = inclusion(64, 32, "uniform")
    assert held[0] == pytest.approx(1 / 33) and held[31] == pytest.approx(32 / 33)


@pytest.mark.parametrize("place", PLACES)
def test_drawn_starts_are_as_likely_as_they_are_said_to_be(place: Any) -> None:
    width = width_of(6)
    windows = Windows((width,), 0.5, place, seed=5)
    drawn = np.zeros(6)
    for step in range(4000):
        drawn[kept_units(6, windows.length(width), windows.starts(step)["a"])] += 1
    np.testing.assert_allclose(drawn / 4000, inclusion(6, 3, place), atol=0.03)


def test_widths_are_drawn_apart_and_again_from_the_same_seed() -> None:
    widths = (width_of(64, "a"), width_of(64, "b"))
    one, other = (Windows(widths, 0.25, "wrap", seed=3) for _ in range(2))
    starts = [one.starts(step) for step in range(8)]
    assert starts == [other.starts(step) for step in range(8)]
    assert len({start["a"] for start in starts}) > 3
    assert any(start["a"] != start["b"] for start in starts)
    assert starts != [Windows(widths, 0.25, "wrap", seed=4).starts(step) for step in range(8)]


def test_windows_of_a_fit_stay_and_an_offset_says_where() -> None:
    width = width_of(10)
    lasting = Windows((width,), 0.5, every="fit", seed=1)
    assert len({lasting.starts(step)["a"] for step in range(20)}) == 1
    rolling = [Windows((width,), 0.5, offset=number).starts()["a"] for number in range(12)]
    assert rolling == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


@pytest.mark.parametrize(
    "settings",
    [{"rate": 0.0}, {"rate": 1.1}, {"place": "middle"}, {"every": "round"}, {"offset": -1}],
)
def test_impossible_windows_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"must|unknown|drawn"):
        Windows((), **({"rate": 0.5} | settings))


def test_the_mean_over_all_starts_divided_by_inclusion_is_unbiased() -> None:
    """The Horvitz-Thompson estimate, by enumeration."""
    change = np.random.default_rng(0).normal(size=12)
    for place, length in itertools.product(PLACES, (3, 4, 5)):
        starts = window_starts(12, length, place).tolist()
        estimate = np.zeros(12)
        for start in starts:
            units = kept_units(12, length, start)
            estimate[units] += change[units] / inclusion(12, length, place)[units] / len(starts)
        np.testing.assert_allclose(estimate, change)
