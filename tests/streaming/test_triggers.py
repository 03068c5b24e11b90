"""When to adapt: each condition, and how they are joined."""

from __future__ import annotations

import pytest

from fl_elastic.devices.power import PowerSupply
from fl_elastic.errors import StreamError
from fl_elastic.streaming import triggers
from fl_elastic.streaming.triggers import (
    AllOf,
    AnyOf,
    EverySamples,
    Moment,
    OnDrift,
    OnMains,
    Trigger,
)


@pytest.mark.parametrize(
    ("trigger", "due", "not_due"),
    [
        (EverySamples(5), Moment(5), Moment(4)),
        (OnDrift(10), Moment(0, since_drift=10), Moment(99, since_drift=9)),
        (OnDrift(0), Moment(0, since_drift=0), Moment(99)),
    ],
)
def test_a_condition_holds_and_does_not(trigger: Trigger, due: Moment, not_due: Moment) -> None:
    assert trigger.due(due) and not trigger.due(not_due)


@pytest.mark.parametrize(("on_mains", "expected"), [(True, True), (False, False), (None, True)])
def test_power(on_mains: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "power_supply", lambda: PowerSupply(on_mains, None))
    assert OnMains().due(Moment(1)) is expected


def test_joined() -> None:
    yes, no = EverySamples(1), EverySamples(9)
    moment = Moment(1)
    assert (yes | no).due(moment) and not (yes & no).due(moment)
    assert (yes & no | yes).due(moment) and not (yes & (no | no)).due(moment)
    assert AllOf(()).due(moment) and not AnyOf().due(moment)


def test_power_is_not_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def supply() -> PowerSupply:
        raise AssertionError("asked")

    monkeypatch.setattr(triggers, "power_supply", supply)
    assert not (EverySamples(9) & OnMains()).due(Moment(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySamples(0),
        lambda: OnDrift(-1),
    ],
)
def test_what_means_nothing_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(StreamError, match="means nothing"):
        make()
