"""The virtual clock: host seconds times slowdown, plus bytes over bandwidth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_clock import walked

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.unequal.availability import Availability
from fl_elastic_simulations.unequal.clock import RoundCost, round_cost, round_seconds
from fl_elastic_simulations.unequal.devices import Device
from fl_elastic_simulations.unequal.outcome import answer

BOARD = Device("board", "A board", 8.0, 2e6, 4e6)
amounts = st.floats(min_value=0, max_value=1e12)


@given(seconds=amounts, up=amounts, down=amounts, factor=st.floats(1, 100))
def test_a_slower_device_takes_proportionally_longer_to_compute_only(
    seconds: float, up: float, down: float, factor: float
) -> None:
    slower = Device("slow", "Slow", 8.0 * factor, 2e6, 4e6)
    before = round_cost(BOARD, host_seconds=seconds, uplink_bytes=up, downlink_bytes=down)
    after = round_cost(slower, host_seconds=seconds, uplink_bytes=up, downlink_bytes=down)
    assert after.compute_seconds == pytest.approx(before.compute_seconds * factor)
    assert (after.uplink_seconds, after.downlink_seconds) == (
        before.uplink_seconds,
        before.downlink_seconds,
    )


@pytest.mark.parametrize("name", ["host_seconds", "uplink_bytes", "downlink_bytes"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_costs_are_refused(name: str, value: float) -> None:
    costs = {"host_seconds": 1.0, "uplink_bytes": 1.0, "downlink_bytes": 1.0, name: value}
    with pytest.raises(ScenarioError, match=name):
        round_cost(BOARD, **costs)


@given(arrivals=st.lists(st.floats(0, 10)), deadline=st.floats(0, 10), told=st.floats(0, 10))
def test_who_is_missing_is_waited_for_until_the_deadline_alone(
    arrivals: list[float], deadline: float, told: float
) -> None:
    waited = round_seconds(arrivals, deadline=deadline, missing=True, told=told)
    assert waited == max([*arrivals, deadline, told])
    assert round_seconds(arrivals, deadline=deadline, told=told) == max([*arrivals, told])


whole = st.integers(0, 4)
# Of whole seconds, so that walking second by second meets every event.
days = st.lists(st.integers(0, 14), unique=True, min_size=2, max_size=6).map(
    lambda each: Availability.of(
        [(float(a), float(b)) for a, b in zip(*[iter(sorted(each))] * 2, strict=False)]
    )
)


@settings(max_examples=300)
@given(
    sent=st.integers(0, 10), parts=st.tuples(whole, whole, whole), there=days, busy=whole,
    needed=st.sampled_from([0.5, 2.0]), memory=st.none() | st.just(1.0),
)  # fmt: skip
def test_what_becomes_of_a_message_is_what_a_walk_through_its_seconds_meets(
    sent: int,
    parts: tuple[int, int, int],
    there: Availability,
    busy: int,
    needed: float,
    memory: float | None,
) -> None:
    cost, free = RoundCost(*map(float, parts)), sent + busy - 2
    found = answer(
        float(sent), cost, there, free=float(free), peak_bytes=needed, memory_bytes=memory
    )
    assert found == walked(sent, cost, there, free, needed, memory)
