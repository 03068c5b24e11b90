"""When devices can be reached: by intervals, from a file, drawn, and together."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.unequal.availability import (
    ALWAYS,
    DAY,
    Availability,
    diurnal,
    read_trace,
    when_enough,
)

PERIOD = 24
intervals = st.lists(
    st.tuples(st.integers(0, PERIOD), st.integers(0, PERIOD)).filter(
        lambda each: each[0] < each[1]
    ),
    max_size=5,
)
periods = st.none() | st.just(float(PERIOD))
HORIZON = 5 * PERIOD


def made(pairs: list[tuple[int, int]], period: float | None) -> Availability:
    return Availability.of([(float(a), float(b)) for a, b in pairs], period)


def seconds_there(pairs: list[tuple[int, int]], period: float | None) -> list[bool]:
    """Second by second: whether anything covers it."""
    within = [n % PERIOD if period else n for n in range(HORIZON)]
    return [any(a <= n < b for a, b in pairs) for n in within]


@given(
    fleet=st.lists(st.tuples(intervals, periods), min_size=1, max_size=4),
    time=st.integers(0, PERIOD), count=st.integers(1, 4),
)  # fmt: skip
def test_enough_are_there_when_a_list_of_seconds_says_so(
    fleet: list[tuple[list[tuple[int, int]], float | None]], time: int, count: int
) -> None:
    devices = [made(*each) for each in fleet]
    together = np.sum([seconds_there(*each) for each in fleet], axis=0)
    first = next((n for n in range(time, HORIZON) if together[n] >= count), None)
    if first is None:
        with pytest.raises(ScenarioError, match="never there at the same time"):
            when_enough(devices, time, count)
    else:
        assert when_enough(devices, time, count) == first


def test_devices_that_repeat_at_different_intervals_meet_later() -> None:
    one, other = Availability(((0.0, 1.0),), 10.0), Availability(((5.0, 6.0),), 11.0)
    both = [n for n in range(500) if one.there(n) and other.there(n)]
    assert when_enough([one, other], 0.0, 2) == both[0] == 60
    assert when_enough([one, other], 61.0, 2) == both[1] == 170
    with pytest.raises(ScenarioError, match="never there at the same time"):
        when_enough([one, Availability(((5.0, 6.0),), 20.0)], 0.0, 2)


def test_who_is_always_there_never_leaves() -> None:
    assert ALWAYS.there(1e12) and ALWAYS.leaves(5.0) == math.inf and ALWAYS.comes(5.0) == 5.0
    whole_day = Availability(((0.0, DAY),), DAY)
    assert whole_day.leaves(3 * DAY + 5) == math.inf


@pytest.mark.parametrize(
    ("pairs", "period", "problem"),
    [
        (((5.0, 4.0),), None, "does not come after"),
        (((0.0, 2.0), (2.0, 3.0)), None, "does not come after"),
        (((0.0, 2.0),), 1.0, "cannot be repeated"),
    ],
)
def test_times_without_order_are_refused(
    pairs: tuple[tuple[float, float], ...], period: float | None, problem: str
) -> None:
    with pytest.raises(ScenarioError, match=problem):
        Availability(pairs, period)


def test_a_trace_is_read_client_by_client(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,from,to,model\n1,10,20,a\n0,0,5.5,b\n1,0,10,a\n")
    assert read_trace(path) == {0: made([], None).of([(0.0, 5.5)]), 1: made([(0, 20)], None)}
    assert read_trace(path, 100.0)[0].comes(50.0) == 100.0
    path.with_suffix(".txt").write_text("\ufeffclient, from, to\r\n0, 0, 5.5\r\n1, 0, 20\r\n")
    assert read_trace(path.with_suffix(".txt")) == read_trace(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("client,from\n0,1\n", "no column 'to'"),
        ("client,from,to\n0,0,5\nx,0,5\n", "line 3: client 'x'"),
        ("client,from,to\n0,7,5\n", "line 2: from '7' to '5'"),
        ("client,from,to\n0,7\n", "line 2: from '7' to None"),
        ("client,from,to\n0,soon,5\n", "line 2: from 'soon'"),
    ],
)
def test_a_trace_that_is_none_is_refused_with_its_line(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=problem):
        read_trace(path)
    with pytest.raises(ScenarioError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_drawn_devices_are_there_for_their_share_and_most_of_them_at_the_peak() -> None:
    devices = [
        diurnal(0.3, swing=0.6, peak_hour=2.0, session_seconds=900, days=7, seed=(1, client))
        for client in range(60)
    ]
    hours = np.zeros(24)
    for time in np.arange(0, 7 * DAY, 600.0):
        hours[int(time % DAY // 3600)] += sum(each.there(time) for each in devices)
    shares = hours / (len(devices) * 7 * 6)
    assert shares.mean() == pytest.approx(0.3, abs=0.02)
    # The wish itself, hour by hour; a standard error of one hour is 0.01.
    wanted = 0.3 * (1 + 0.6 * np.cos(2 * np.pi * (np.arange(24) + 0.5 - 2) / 24))
    assert np.abs(shares - wanted).max() < 0.05


def test_a_device_is_drawn_by_its_seed_alone() -> None:
    def drawn(*seed: int) -> Availability:
        return diurnal(
            0.2, swing=0.5, peak_hour=2.0, session_seconds=600, days=1, seed=(seed[0], seed[1])
        )

    assert drawn(1, 2) == drawn(1, 2)
    assert len({drawn(1, 2), drawn(2, 2), drawn(1, 3)}) == 3
    with pytest.raises(ScenarioError, match="at the peak"):
        diurnal(0.7, swing=0.6, peak_hour=2.0, session_seconds=600, days=1, seed=(0, 0))


def test_a_trace_that_was_edited_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,from,to\n0,0,10\n")
    assert read_trace(path)[0].intervals == ((0.0, 10.0),)
    path.write_text("client,from,to\n0,0,10\n0,20,30\n")
    assert read_trace(path)[0].intervals == ((0.0, 10.0), (20.0, 30.0))
