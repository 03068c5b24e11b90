"""What a plan says about itself, and what a request allows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic.planning import Plan, PlanRequest
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.testing import made_up_profile

CONV = TensorGroup("conv", ("conv.weight", "conv.bias"), ((4, 3, 3, 3), (4,)), GroupKind.CONV)
NORM = TensorGroup("norm", ("norm.weight", "norm.bias"), ((4,), (4,)), GroupKind.NORM)
BARE = TensorGroup("bare", ("bare.weight",), ((4, 4),), GroupKind.LINEAR)


def plan_of(*modes: Mode) -> Plan:
    return Plan("test", (CONV, NORM, BARE), modes, 1.0, 0.4, 0.2, 0.5, 100.0)


def test_depth_is_the_deepest_trained_group() -> None:
    assert plan_of(Mode.FULL, Mode.FROZEN, Mode.FROZEN).depth == 0
    assert plan_of(Mode.FULL, Mode.FROZEN, Mode.FULL).depth == 2
    assert plan_of(Mode.FROZEN, Mode.BIAS, Mode.FROZEN).depth == 1


def test_every_mode_but_frozen_counts_as_trained() -> None:
    assert plan_of(Mode.FULL, Mode.FROZEN, Mode.BIAS).mask.tolist() == [True, False, True]


def test_each_mode_trains_its_parameters() -> None:
    assert plan_of(Mode.FULL, Mode.FULL, Mode.FULL).trained_parameters == (
        "conv.weight", "conv.bias", "norm.weight", "norm.bias", "bare.weight",
    )  # fmt: skip
    assert plan_of(Mode.BIAS, Mode.BIAS, Mode.BIAS).trained_parameters == (
        "conv.bias", "norm.weight", "norm.bias",
    )  # fmt: skip
    assert plan_of(Mode.FROZEN, Mode.FULL, Mode.FROZEN).trained_parameters == (
        "norm.weight", "norm.bias",
    )  # fmt: skip


def test_speedup_and_step_fraction_follow_from_the_times() -> None:
    plan = plan_of(Mode.FULL, Mode.FROZEN, Mode.FROZEN)
    assert plan.predicted_speedup == pytest.approx(2.5)
    assert plan.feasible and plan.step_fraction == 1.0
    tight = replace(plan, allowed_step_seconds=0.1)
    assert not tight.feasible and tight.step_fraction == pytest.approx(0.25)
    assert replace(plan, allowed_step_seconds=math.inf).step_fraction == 1.0


def test_a_deadline_is_spread_and_the_measured_pace_counts() -> None:
    profile = made_up_profile()
    request = PlanRequest(profile, Budget(deadline=6.0), np.ones(len(profile)), steps=3)
    assert request.allowed_step_seconds == pytest.approx(2.0)
    assert replace(request, correction=2.0).allowed_step_seconds == pytest.approx(1.0)
    speedup = replace(request, budget=Budget(speedup=4.0))
    assert speedup.allowed_step_seconds == pytest.approx(profile.full_step_seconds / 4)


def test_fitting_means_time_memory_and_uplink() -> None:
    profile = made_up_profile(groups=5)
    mask = np.array([True, True, False, False, False])
    exact = Budget(
        speedup=profile.full_step_seconds / profile.step_seconds(mask),
        memory=mask_bytes(profile, mask),
        uplink=float(profile.parameter_bytes[:2].sum()),
    )
    request = PlanRequest(profile, exact, np.ones(5))
    assert request.fits(mask) and request.fits_bytes(mask)
    more = np.array([True, True, True, False, False])
    for part in ("speedup", "memory", "uplink"):
        only = PlanRequest(profile, Budget(**{part: getattr(exact, part)}), np.ones(5))
        assert only.fits(mask) and not only.fits(more)
    assert not PlanRequest(profile, Budget(uplink=exact.uplink), np.ones(5)).fits_bytes(more)


@pytest.mark.parametrize("part", ["memory", "uplink"])
def test_a_plan_that_fewer_steps_cannot_mend_is_refused(part: str) -> None:
    profile = made_up_profile(groups=4)
    request = PlanRequest(profile, Budget(**{part: 5.0}), np.ones(4))
    with pytest.raises(BudgetError, match=part) as caught:
        request.plan_of_mask("mine", np.ones(4, dtype=bool))
    assert "'mine'" in str(caught.value) and "\n" not in str(caught.value)


def test_uplink_counts_only_what_a_mode_sends() -> None:
    profile = made_up_profile(groups=4)
    biases = 4.0 * sum(shape[0] for group in profile.graph.groups for shape in group.shapes[1:])
    modes = [Mode.BIAS] * 4
    enough = PlanRequest(profile, Budget(uplink=biases), np.ones(4))
    assert enough.plan("bias", modes).modes == tuple(modes)
    with pytest.raises(BudgetError, match="uplink"):
        PlanRequest(profile, Budget(uplink=biases - 1), np.ones(4)).plan("bias", modes)
