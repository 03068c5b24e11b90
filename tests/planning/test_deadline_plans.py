"""One deadline for steps and sending, what further steps are worth, and policies that do not fit a model."""

from __future__ import annotations

import numpy as np
import pytest

from fl_elastic import Budget
from fl_elastic.budget import sendable
from fl_elastic.errors import BudgetError, PlanError
from fl_elastic.planning import POLICIES, PlanRequest
from fl_elastic.testing import made_up_profile

STEPS = 10
PROFILE = made_up_profile(groups=8)
SIZES = PROFILE.parameter_bytes
EVERY = np.ones(8, dtype=bool)


def request(budget: Budget) -> PlanRequest:
    rate = budget.sending_seconds_per_byte(STEPS)
    return PlanRequest(
        PROFILE.with_sending(rate),
        sendable(budget),
        np.random.default_rng(0).uniform(0.1, 1.0, 8),
        steps=STEPS,
        sending_seconds_per_byte=rate,
    )


@pytest.mark.parametrize("policy", ["elastic", "last_k", "random", "head"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_steps_and_sending_fit_the_deadline_together(policy: str, share: float) -> None:
    deadline = share * STEPS * PROFILE.full_step_seconds
    budget = Budget(deadline=deadline, bandwidth=float(SIZES.sum()) / (0.4 * deadline))
    plan = POLICIES.make(policy).plan(request(budget))
    sending = float(SIZES[plan.mask].sum()) / (budget.bandwidth or 1.0)
    # The plan's figures are those of the steps alone, told apart from the sending.
    assert plan.sending_seconds == pytest.approx(sending)
    assert plan.predicted_step_seconds == pytest.approx(PROFILE.step_seconds(plan.mask))
    assert plan.full_step_seconds == pytest.approx(PROFILE.full_step_seconds)
    steps = STEPS * plan.step_fraction
    assert steps * plan.predicted_step_seconds + sending <= deadline * (1 + 1e-9)


def test_sending_takes_at_most_half_of_the_deadline() -> None:
    assert sendable(Budget(deadline=10.0, bandwidth=6.0)).uplink == 30.0
    assert sendable(Budget(deadline=10.0, bandwidth=6.0, uplink=7.0)).uplink == 7.0
    for unlimited in (Budget(deadline=10.0), Budget(bandwidth=6.0), Budget(speedup=2.0)):
        assert sendable(unlimited) == unlimited
        assert unlimited.sending_seconds_per_byte(5) == 0.0
    assert PROFILE.with_sending(0.0) is PROFILE


def test_a_policy_that_sends_everything_says_that_it_takes_too_long() -> None:
    deadline = 100 * STEPS * PROFILE.full_step_seconds
    budget = Budget(deadline=deadline, bandwidth=float(SIZES.sum()) / (2 * deadline))
    rate = budget.sending_seconds_per_byte(STEPS)
    asked = PlanRequest(
        PROFILE.with_sending(rate), budget, np.ones(8), steps=STEPS, sending_seconds_per_byte=rate
    )
    with pytest.raises(
        BudgetError,
        match=r"sending the .* bytes that policy 'full' trains .* of the deadline are left",
    ):
        POLICIES.make("full").plan(asked)


def refusal(budget: Budget) -> str:
    rate = budget.sending_seconds_per_byte(STEPS)
    asked = PlanRequest(
        PROFILE.with_sending(rate), sendable(budget), np.ones(8), steps=STEPS,
        sending_seconds_per_byte=rate,
    )  # fmt: skip
    with pytest.raises(BudgetError, match="not even the head fits") as caught:
        POLICIES.make("elastic").plan(asked)
    return str(caught.value)


def test_a_head_that_does_not_fit_blames_the_limit_that_it_breaks() -> None:
    head = float(SIZES[asked_head()])
    late = refusal(Budget(deadline=100.0, bandwidth=head / 60.0))
    assert "takes 60 s, more than half of the 100 s that are left of the deadline" in late
    assert "at least 20 s more" in late and "memory" not in late and "uplink" not in late
    # Choosing took 45 of 100 s, and all of 100 s.
    part = refusal(Budget(deadline=100.0, bandwidth=head / 60.0).after(45.0, 1.0, STEPS))
    assert "half of the 55 s that are left" in part and "at least 65 s more" in part
    none = refusal(Budget(deadline=100.0, bandwidth=head / 60.0).after(145.0, 1.0, STEPS))
    assert "half of the 0 s that are left" in none and "at least 120 s more" in none
    narrow = refusal(Budget(uplink=head / 2))
    assert f"sends {head:.0f} bytes, the uplink budget is {head / 2:.0f}" in narrow
    assert "memory" not in narrow and "deadline" not in narrow
    small = refusal(Budget(memory=1.0))
    assert "of memory, the budget is 1: raise it to" in small and "uplink" not in small
    both = refusal(Budget(memory=1.0, uplink=1.0))
    assert "of memory" in both and "the uplink budget is 1" in both


def asked_head() -> int:
    return PROFILE.graph.head


def test_fewer_returns_prefer_more_of_the_model_in_fewer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fewest = []
    for share in (0.35, 0.5, 0.65, 0.8):
        budget = Budget(deadline=share * STEPS * PROFILE.full_step_seconds)
        trained = []
        for returns in (1.0, 0.5, 0.0):
            monkeypatch.setattr("fl_elastic.planning.request.STEP_GAIN_EXPONENT", returns)
            trained.append(int(POLICIES.make("elastic").plan(request(budget)).mask.sum()))
        assert trained == sorted(trained) and trained[-1] == 8
        fewest.append(trained[0])
    assert min(fewest) < 8


def test_what_is_gained_is_importance_times_a_power_of_the_whole_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = int(0.25 * STEPS)
    budget = Budget(deadline=(whole + 0.9) * PROFILE.full_step_seconds)
    for returns in (1.0, 0.5, 0.0):
        monkeypatch.setattr("fl_elastic.planning.request.STEP_GAIN_EXPONENT", returns)
        asked = request(budget)
        expected = asked.importance.sum() * (whole / STEPS) ** returns
        assert asked.expected_decrease(EVERY) == pytest.approx(expected)


@pytest.mark.parametrize("policy", ["gradient_filter", "tinytrain", "sparse_update"])
def test_a_policy_that_does_not_fit_the_model_says_so(policy: str) -> None:
    single = made_up_profile(groups=1)
    with pytest.raises(PlanError, match=rf"'{policy}'.*this model has none.*'elastic'"):
        POLICIES.make(policy).refuse_misfit(single)


def test_policies_that_fit_are_not_refused() -> None:
    for policy in ("elastic", "joint", "tinytrain", "sparse_update", "full"):
        assert POLICIES.make(policy).refuse_misfit(PROFILE) is None
    with pytest.raises(PlanError, match="filters the last two-dimensional convolutions"):
        # Linear layers have nothing to filter.
        POLICIES.make("gradient_filter").refuse_misfit(PROFILE)
