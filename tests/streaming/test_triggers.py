"""When to adapt: each condition, how they are joined, and clocks that jump."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.devices.power import PowerSupply
from fl_elastic.errors import StreamError
from fl_elastic.streaming.progress import StreamClock
from fl_elastic.streaming.triggers import (
    AllOf,
    AnyOf,
    EverySamples,
    EverySeconds,
    Moment,
    OnDrift,
    OnMains,
    Trigger,
    WhenIdle,
)


@pytest.mark.parametrize(
    ("trigger", "due", "not_due"),
    [
        (EverySamples(5), Moment(5, 0.0), Moment(4, 1e9)),
        (EverySeconds(5.0), Moment(1, 5.0), Moment(1, 4.9)),
        (EverySeconds(5.0), Moment(1, 5.0), Moment(0, 1e9)),
        (OnDrift(10), Moment(0, 0.0, since_drift=10), Moment(99, 0.0, since_drift=9)),
        (OnDrift(0), Moment(0, 0.0, since_drift=0), Moment(99, 0.0)),
        (WhenIdle(2.0), Moment(1, 0.0, idle=2.0), Moment(1, 9.0, idle=1.0)),
        (WhenIdle(2.0), Moment(1, 0.0, idle=2.0), Moment(0, 0.0, idle=9.0)),
    ],
)
def test_a_condition_holds_and_does_not(trigger: Trigger, due: Moment, not_due: Moment) -> None:
    assert trigger.due(due) and not trigger.due(not_due)


@pytest.mark.parametrize(("on_mains", "expected"), [(True, True), (False, False), (None, True)])
def test_power(on_mains: bool | None, expected: bool) -> None:
    moment = Moment(1, 1.0, supply=lambda: PowerSupply(on_mains, None))
    assert OnMains().due(moment) is expected


def test_joined() -> None:
    yes, no = EverySamples(1), EverySamples(9)
    moment = Moment(1, 0.0)
    assert (yes | no).due(moment) and not (yes & no).due(moment)
    assert (yes & no | yes).due(moment) and not (yes & (no | no)).due(moment)
    assert AllOf(()).due(moment) and not AnyOf().due(moment)


def test_power_is_not_asked_for_nothing() -> None:
    def supply() -> PowerSupply:
        raise AssertionError("asked")

    assert not (EverySamples(9) & OnMains()).due(Moment(1, 0.0, supply=supply))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySamples(0),
        lambda: EverySeconds(0.0),
        lambda: EverySeconds(math.nan),
        lambda: OnDrift(-1),
        lambda: WhenIdle(-1.0),
    ],
)
def test_what_means_nothing_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(StreamError, match="means nothing"):
        make()


def firings(times: Sequence[float], every: float) -> list[int]:
    """Which samples of a stream make a trigger fire that waits for time."""
    clock, since, fired = StreamClock(), 0.0, []
    for index, t in enumerate(times):
        clock = clock.at(t)
        if EverySeconds(every).due(Moment(1, clock.passed - since)):
            since = clock.passed
            fired.append(index)
    return fired


def test_a_clock_that_goes_back_does_not_block() -> None:
    times = [1000.0 + i for i in range(10)] + [-5e6 + i for i in range(10)]
    # Ten seconds to nine samples of the first part, and the rest of the second.
    assert firings(times, 4.0) == [4, 8, 13, 17]


def test_a_clock_that_leaps_to_and_fro_does_not_flood() -> None:
    times = [i + (1e9 if i % 2 else 0.0) for i in range(1000)]
    assert firings(times, 50.0) == []
    assert firings([float(i) for i in range(1000)], 50.0) == list(range(50, 1000, 50))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50))
def test_any_clock_at_all_gives_time_that_passes(times: list[float]) -> None:
    clock = StreamClock()
    for t in times:
        later = clock.at(t)
        assert 0 <= later.passed - clock.passed <= clock.longest
        clock = later
    before = clock.passed
    last = clock.last if clock.last is not None and abs(clock.last) < 1e9 else 0.0
    assert clock.at(last).at(last + 10).passed >= before + 10 - 1e-5
