"""The joint policy mixes modes, holds every limit, and is worth at least what whole groups are worth."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from slow_ones import slow_unless
from small_models import conv_net, images, loss_fn, sgd
from torch import nn

from fl_elastic.budget import Budget, sendable
from fl_elastic.errors import BudgetError
from fl_elastic.groups import Mode
from fl_elastic.methods.joint.policy import STANDARD_MODES
from fl_elastic.planning import POLICIES, Plan, PlanRequest
from fl_elastic.planning.importance.fidelity import Fidelity
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.memory import step_memory
from fl_elastic.profiling.profile import ModeCosts
from fl_elastic.testing import made_up_profile

N, K = 8, len(STANDARD_MODES)


def request_of(budget: Budget, *, seed: int = 0, cosine: float | None = None) -> PlanRequest:
    """A request on made-up costs where every mode was measured."""
    generator = np.random.default_rng(seed)
    profile = made_up_profile(groups=N, seed=seed)
    update = np.tile([0.3, 0.6, 0.4, 0.3], (N, 1))
    profile = replace(profile, modes=ModeCosts(STANDARD_MODES, update, np.ones((N, K))))
    weights = generator.uniform(0.5, 1.0, (N, K)) if cosine is None else np.full((N, K), cosine)
    fidelity = Fidelity(STANDARD_MODES, weights)
    return PlanRequest(profile, budget, generator.uniform(0.1, 1.0, N), fidelity=fidelity)


def worth(request: PlanRequest, plan: Plan) -> float:
    """Importance times squared cosines."""
    assert request.fidelity is not None
    total = 0.0
    for group, mode in enumerate(plan.modes):
        if mode.is_frozen:
            continue
        cosine = 1.0
        if mode != Mode.FULL:
            column = STANDARD_MODES.index(mode)
            cosine = float(request.fidelity.weights[group, column])
        total += request.importance[group] * cosine**2
    return total


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("speedup", [1.2, 1.6, 2.2])
def test_mixing_is_worth_at_least_as_much_as_whole_groups(speedup: float, seed: int) -> None:
    request = request_of(Budget(speedup=speedup), seed=seed)
    mixed, whole = POLICIES.make("joint").plan(request), POLICIES.make("elastic").plan(request)
    assert mixed.feasible
    assert worth(request, mixed) >= worth(request, whole) * (1 - 1e-6)


def test_cheap_modes_are_used_where_they_keep_the_gradient_and_not_where_they_lose_it() -> None:
    cheap = []
    for cosine in (0.99, 0.05):
        request = request_of(Budget(speedup=1.6), cosine=cosine)
        plan = POLICIES.make("joint").plan(request)
        assert worth(request, plan) > 0
        cheap.append(sum(mode.kind in ("channels", "bias") for mode in plan.modes))
    assert cheap[0] > 3 > cheap[1]


def test_groups_out_of_reach_are_left_alone() -> None:
    for name in ("joint", "elastic", "last_k", "random"):
        request = replace(request_of(Budget(speedup=1.2)), reachable=3)
        plan = POLICIES.make(name).plan(request)
        assert plan.depth < 3, name


@pytest.fixture(scope="module")
def measured() -> CostProfile:
    torch.manual_seed(0)
    return profile_model(conv_net().train(), loss_fn, images()[0], optimizer_fn=sgd, clock="cpu")


@pytest.mark.parametrize(
    "given", [{"memory": 10.4}, {"uplink": 10.4}, {"memory": 10.4, "uplink": 9.0}]
)
@pytest.mark.parametrize("policy", ["joint", "elastic", "full", "last_k", "head", "bias", "random"])
def test_a_refusal_names_the_budgets_that_were_given_and_the_least_that_do(
    measured: CostProfile, policy: str, given: dict[str, float]
) -> None:
    def plan(budget: Budget) -> Plan:
        return POLICIES.make(policy).plan(PlanRequest(measured, budget, np.ones(len(measured))))

    limits = dict(given)
    for _ in given:
        # A policy may name one limit after the other.
        with pytest.raises(BudgetError) as caught:
            plan(Budget(**limits))
        said = str(caught.value)
        assert "forced" not in said and "limit" not in said and "infeasible" not in said
        for name, limit in limits.items():
            if found := re.search(rf"{name}[^;]* budget is {limit:.0f}: raise it to (\d+)", said):
                limits[name] = float(found[1])
        if all(limits[name] > given[name] for name in given):
            break
    plan(Budget(**limits))
    for name, least in limits.items():
        with pytest.raises(BudgetError):
            plan(Budget(**{**limits, name: least - 1}))


@pytest.mark.parametrize("seed", range(4))
def test_a_head_that_fits_in_a_cheaper_mode_alone_is_trained_in_it(seed: int) -> None:
    request = request_of(Budget(), seed=seed)
    head = request.profile.graph.head
    modes = [Mode.FROZEN] * N
    needs = []
    for mode in (Mode.FULL, *STANDARD_MODES):
        modes[head] = mode
        needs.append(step_memory(request.profile, modes, lean=True).total)
    assert min(needs) < needs[0]
    tight = replace(request, budget=Budget(memory=min(needs)))
    plan = POLICIES.make("joint").plan(tight)
    assert plan.mask.tolist() == [index == head for index in range(N)]
    assert plan.predicted_step_bytes == min(needs)
    with pytest.raises(BudgetError, match=rf"needs {int(np.ceil(min(needs)))} bytes"):
        POLICIES.make("joint").plan(replace(tight, budget=Budget(memory=min(needs) - 1)))


def test_filtering_as_published_takes_the_last_four_convolutions() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)),
        nn.Conv2d(3, 3, 1, stride=2), nn.Flatten(), nn.Linear(48, 3),
    )  # fmt: skip
    profile = profile_model(model, loss_fn, images()[0], clock="cpu")
    plan = POLICIES.make("gradient_filter").plan(
        PlanRequest(profile, Budget(), np.zeros(len(profile)))
    )
    # The strided 1 x 1 convolution is a shortcut, which is never filtered.
    assert [str(mode) for mode in plan.modes] == [
        "full",
        "frozen",
        *["wx2"] * 4,
        "frozen",
        "frozen",
    ]
    tight = Budget(uplink=float(profile.parameter_bytes[[0, 2, 3]].sum()))
    plan = POLICIES.make("gradient_filter").plan(
        PlanRequest(profile, tight, np.zeros(len(profile)))
    )
    assert [str(mode) for mode in plan.modes].count("wx2") == 2


def deadline_request(seed: int, share: float, sending: float) -> PlanRequest:
    """A round of ten steps with a share of full training's time, of which sending all would take another share."""
    profile = made_up_profile(groups=N, seed=seed)
    deadline = share * 10 * profile.full_step_seconds
    bandwidth = float(profile.parameter_bytes.sum()) / (sending * deadline) if sending else None
    budget = Budget(deadline=deadline, bandwidth=bandwidth)
    rate = budget.sending_seconds_per_byte(10)
    return PlanRequest(
        profile.with_sending(rate), sendable(budget),
        np.random.default_rng(seed).uniform(0.1, 1.0, N), steps=10,
        sending_seconds_per_byte=rate,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sending", "returns"),
    slow_unless(
        lambda sending, returns: (sending, returns) in ((0.0, 1.0), (0.9, 0.5)),
        product((0.0, 0.5, 0.9), (1.0, 0.5)),
    ),
)
def test_whole_groups_decrease_the_loss_as_much_as_policy_elastic_expects(
    sending: float, returns: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_elastic.planning.request.STEP_GAIN_EXPONENT", returns)
    ratios = []
    for seed in range(3):
        for share in (0.35, 0.6, 0.85):
            request = deadline_request(seed, share, sending)
            found = [
                request.expected_decrease(POLICIES.make(name).plan(request).mask)
                for name in ("joint", "elastic")
            ]
            ratios.append(found[0] / found[1])
    assert np.mean(ratios) > 0.99 and min(ratios) > 0.9


@pytest.mark.slow
def test_fewer_returns_prefer_more_of_the_model_also_here(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = 0
    for seed in range(12):
        plans = []
        for returns in (1.0, 0.0):
            monkeypatch.setattr("fl_elastic.planning.request.STEP_GAIN_EXPONENT", returns)
            plans.append(POLICIES.make("joint").plan(deadline_request(seed, 0.5, 0.0)))
        assert plans[1].mask.sum() >= plans[0].mask.sum()
        changed += int(plans[0].modes != plans[1].modes)
    assert changed > 6
