"""What the steps of the best choice leave of a budget pays for dearer steps at the end of a fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_models import chain, flat_profile, loss_fn, sgd, vectors
from test_budget_control import control_of, plan_of, take
from trainer_settings import options_of, state_with

from fl_elastic.budget import Budget
from fl_elastic.training import ElasticTrainer, FitReport

NAMES = ("6", "4", "2", "0")
FULL = 15.0


def fit(
    budget: Budget,
    steps: int,
    *,
    policy: str = "elastic",
    scores: tuple[float, ...] = (1.0,) * 4,
    **changes: float,
) -> tuple[ElasticTrainer, FitReport]:
    """One fit by predicted seconds: a step of the chain's head takes 6 s, one of everything 15."""
    settings: dict[str, Any] = {"closed_loop": False, "full_update_every": 0} | changes
    model, batches = chain(), vectors(steps)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=budget, policy=policy, profile=flat_profile(model, batches[0]),
        options=options_of(**settings),
        state=state_with(NAMES, list(scores), [0] * 4, 0, 10_000, exploration=0.0),
    )  # fmt: skip
    return trainer, trainer.fit(batches)


@pytest.mark.parametrize("seed", range(12))
def test_budgets_are_used_to_the_last_steps_and_never_overrun(seed: int) -> None:
    draw = np.random.default_rng(seed)
    steps, per_step = int(draw.integers(16, 60)), float(draw.uniform(6.5, 14.5))
    scores = tuple(float(each) for each in draw.uniform(0.1, 1.0, 4))
    allowed = per_step * steps
    speedup = seed % 2 == 0
    budget = Budget(speedup=FULL / per_step) if speedup else Budget(deadline=allowed)
    _, report = fit(budget, steps, scores=scores)
    # A speed-up holds on average: half a step may be overdrawn.
    assert report.predicted_seconds <= allowed + (FULL / 2 if speedup else 1e-6)
    # No plan's steps alone come so near: they cost whole seconds.
    masks = [plan.mask for _, plan in report.plans]
    assert report.predicted_seconds >= allowed - FULL or masks[-1].all()
    first = report.plans[0][1]
    assert report.plan.modes == first.modes, "not the plan that the budget was planned for"
    assert speedup <= first.feasible


def test_the_dearer_steps_are_trained_and_counted() -> None:
    # Steps of the head take 6 s, those of two groups 9: of 8.4 s each the last ones may take more.
    trainer, report = fit(Budget(speedup=FULL / 8.4), 20)
    assert [(at, int(plan.mask.sum())) for at, plan in report.plans] == [(0, 1), (10, 2), (15, 3)]
    steps = trainer.update().steps
    assert [steps.get(f"{name}.weight", 0) for name in NAMES] == [20, 10, 5, 0]
    assert report.predicted_seconds == 10 * 6 + 5 * 9 + 5 * 12 <= 8.4 * 20


@pytest.mark.parametrize("policy", ["head", "bias", "full"])
def test_a_policy_that_is_defined_by_what_it_trains_keeps_to_it(policy: str) -> None:
    _, report = fit(Budget(deadline=14.9 * 20), 20, policy=policy)
    assert len(report.plans) == 1


def test_where_all_worth_is_trained_already_nothing_is_looked_for() -> None:
    _, report = fit(Budget(speedup=1.2), 20, scores=(1.0, 0.0, 0.0, 0.0), planning_seconds=2.0)
    assert report.choosing_seconds == 2.0 and len(report.plans) == 1


def test_a_look_that_takes_more_than_it_gains_is_not_made() -> None:
    told = {
        planning: fit(Budget(speedup=FULL / 8.4), 20, planning_seconds=planning)[1]
        for planning in (0.0, 3.0, 30.0)
    }
    assert [len(report.plans) for report in told.values()] == [3, 2, 1]
    assert [report.choosing_seconds for report in told.values()] == [0.0, 6.0, 30.0]
    assert all(report.predicted_seconds <= 8.4 * 20 + FULL / 2 for report in told.values())


def test_looks_come_after_half_of_the_steps_and_half_of_what_is_left() -> None:
    control = control_of(200.0, 100, correct=False)
    plan, due = plan_of(1.0), []
    for _ in range(100):
        take(control, 1, 1.0, predicted=1.0)
        if control.look_for_surplus(plan):
            due.append(control.steps)
            control.postpone_surplus()
    assert due == [50, 75, 88, 94]


def test_what_each_step_may_take_is_what_is_left_over_the_steps_that_are() -> None:
    control = control_of(150.0, 100, correct=False)
    take(control, 60, 1.0, predicted=1.0)
    assert control.costlier_step_seconds(plan_of(1.0)) == pytest.approx(90.0 / 40)
    assert control.costlier_step_seconds(plan_of(2.25)) == 0.0
    # By the cost profile: on a device twice as slow as it says, half of the measured seconds.
    slow = control_of(300.0, 100, relative=True)
    take(slow, 60, 2.0, predicted=1.0)
    assert slow.costlier_step_seconds(plan_of(1.0)) == pytest.approx(180.0 / 40 / 2)
    # A deadline is planned for what nine of ten steps do not exceed.
    uneven = control_of(300.0, 100)
    for _ in range(15):
        take(uneven, 3, 2.0, predicted=1.0)
        take(uneven, 1, 3.0, predicted=1.0)
    assert uneven.costlier_step_seconds(plan_of(1.0)) == pytest.approx(165.0 / 40 / 3)
