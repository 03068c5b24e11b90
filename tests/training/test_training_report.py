"""What a fit says of itself: how much faster it was, and what its choice was based on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_models import (
    chain,
    conv_net,
    elastic_trainer,
    flat_profile,
    images,
    loss_fn,
    sgd,
    vectors,
)
from torch import nn
from trainer_settings import free_probes, settings_of

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch, LossFn
from fl_elastic.planning.plain import GivenPolicy
from fl_elastic.training import (
    ElasticTrainer,
    FitReport,
    SelectionState,
    Timing,
    TrainerOptions,
)
from fl_elastic.training.planner import Planner

HALF = Budget(speedup=1.5)
NAMES = ("6", "4", "2", "0")


def report_of(policy: str = "elastic", budget: Budget = HALF, **changes: object) -> FitReport:
    options = {"closed_loop": False, "full_update_every": 0} | changes
    model, batches = chain(), vectors(4)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=budget, policy=policy, profile=flat_profile(model, batches[0]),
        **settings_of(**options),  # type: ignore[arg-type]
    )  # fmt: skip
    return trainer.fit(batches)


def test_full_passes_timed_between_the_steps_are_what_speedups_compare_with() -> None:
    report = replace(
        report_of(), steps=10, requested_steps=20, seconds=10.0, selection_seconds=2.5,
        step_seconds=1.0, full_step_seconds=1.2,
    )  # fmt: skip
    assert report.step_speedup == pytest.approx(1.2)
    assert report.speedup == pytest.approx(20 * 1.2 / 12.5)
    slowed = replace(report, full_ratio=1.5)
    assert slowed.step_speedup == pytest.approx(1.8)
    assert slowed.speedup == pytest.approx(20 * 1.8 / 12.5)


def test_a_fit_reports_the_full_passes_that_it_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = chain(), vectors(40)
    # Of an estimate a full pass is timed at once.
    profile = replace(flat_profile(model, batches[0]), estimated=True)
    monkeypatch.setattr("fl_elastic.training.measured.full_pass_ratio", lambda *_: 1.75)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.5), policy="head", profile=profile
    )
    report = trainer.fit(batches, epochs=2)
    assert report.full_ratio == 1.75
    full = 1.75 * report.full_step_seconds
    assert report.step_speedup == pytest.approx(full / report.step_seconds)


def test_full_passes_are_timed_on_batches_of_the_shape_whose_costs_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batches = chain(), vectors(12)
    few = [(x[:2], y[:2]) for x, y in vectors(28)]
    profile = replace(flat_profile(model, batches[0]), estimated=True)
    sizes = []

    def timed(model: nn.Module, loss_fn: LossFn, batch: Batch, *_: Any) -> float:
        sizes.append(len(batch[0]))
        return 1.0

    monkeypatch.setattr("fl_elastic.training.measured.full_pass_ratio", timed)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.5), policy="head", profile=profile
    )
    trainer.fit([*batches[:1], *few])
    assert sizes and {*sizes} == {len(batches[0][0])}


def test_without_a_timed_pass_the_profile_stands_in() -> None:
    report = report_of()
    assert report.full_ratio is None
    assert report.step_speedup == pytest.approx(report.full_step_seconds / report.step_seconds)


@pytest.mark.parametrize("policy", ["full", "head", "last_k", "bias", "random"])
def test_a_policy_without_importance_follows_a_fixed_rule(policy: str) -> None:
    for budget in (Budget(), HALF):
        assert report_of(policy, budget).based_on == "fixed rule"


@pytest.mark.parametrize("policy", ["elastic", "joint"])
def test_what_fits_whole_needs_no_choice(policy: str) -> None:
    assert report_of(policy, Budget()).based_on == "everything fits"


def test_importance_is_measured_in_the_first_fit_and_remembered_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_probes(monkeypatch)
    batches = vectors(4)
    trainer = elastic_trainer(chain(), batches[0], HALF)
    told = [trainer.fit(batches).based_on for _ in range(2)]
    assert told == ["measured importance", "remembered importance"]


def test_a_policy_with_its_own_importance_measures_it_also_where_everything_fits() -> None:
    assert report_of("tinytrain", Budget()).based_on == "measured importance"


def test_a_short_fit_without_scores_goes_by_size_and_turns() -> None:
    # A probe may not take more than a share of the time: in a short fit there is none.
    report = report_of()
    assert report.based_on == "size and turns"
    # What it trained it knows from its own steps.
    assert set(report.importance) == {
        group.name for group, on in zip(report.plan.groups, report.plan.mask, strict=True) if on
    }


def test_scores_without_anything_above_zero_are_no_basis() -> None:
    batches = vectors(4)
    model = chain()
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=HALF, profile=flat_profile(model, batches[0]),
        options=TrainerOptions(full_update_every=0, timing=Timing(closed_loop=False)),
        state=SelectionState(NAMES, [-1.0] * 4, [0] * 4, 0, 100),
    )  # fmt: skip
    assert trainer.fit(batches).based_on == "size and turns"


def test_a_short_first_fit_learns_from_full_steps_and_the_next_chooses_by_it() -> None:
    batches, model = vectors(4), chain()
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=HALF, profile=flat_profile(model, batches[0]),
        options=TrainerOptions(full_update_every=100, timing=Timing(closed_loop=False)),
    )  # fmt: skip
    first, second = trainer.fit(batches), trainer.fit(batches)
    assert first.based_on == "everything, to learn its worth"
    assert first.plan.policy == "full" and first.steps == 2
    assert set(first.importance) == set(NAMES)
    assert second.based_on == "remembered importance" and second.plan.policy == "elastic"


def test_a_first_fit_that_pays_for_one_full_step_only_learns_nothing_from_it() -> None:
    report = report_of(full_update_every=100, budget=Budget(speedup=3.0))
    assert report.based_on == "size and turns"


def test_a_fit_that_trains_everything_for_coverage_says_so() -> None:
    assert report_of(full_update_every=1).based_on == "everything, in turn"
    assert report_of("head", full_update_every=1).based_on == "fixed rule"


def test_groups_that_the_server_named_are_its_choice() -> None:
    batches = images(3)
    model = conv_net()
    trainer = elastic_trainer(model, batches[0], Budget(speedup=1.1))
    trainer.planner.policy = GivenPolicy([flat_profile(model, batches[0]).group_names[0]])
    assert trainer.fit(batches).based_on == "the server's choice"


def test_the_server_is_told_what_the_choice_was_based_on() -> None:
    assert report_of(budget=Budget()).to_metrics()["based-on"] == "everything fits"


def test_whether_everything_fits_is_asked_once_for_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    request = Planner.request

    def counted(planner: Planner, correction: float = 1.0) -> object:
        asked.append(correction)
        return request(planner, correction)

    monkeypatch.setattr(Planner, "request", counted)
    model, batches = chain(), vectors(50)
    trainer = elastic_trainer(model, batches[0], Budget())
    report = trainer.fit(batches)
    assert report.steps == 50 and np.all(report.plan.mask)
    # Once for the question and once for the plan, not after each of fifty steps.
    assert len(asked) <= 3
