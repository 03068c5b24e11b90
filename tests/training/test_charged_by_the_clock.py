"""What a fit does besides its steps is taken off its time, by a clock that moves as the test says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Batch, chain, flat_profile, loss_fn, sgd, trainer_of, vectors
from torch import Tensor

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError
from fl_elastic.planning import Plan
from fl_elastic.profiling import CostProfile
from fl_elastic.training import ElasticTrainer, fit, trainer
from fl_elastic.training.fit_start import FitStart
from fl_elastic.training.measured import full_pass_ratio
from fl_elastic.training.step import TrainingStep

ALL = ["6", "4", "2", "0"]


class Hands:
    """A clock whose seconds pass when they are told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hands:
    """The clock of every fit; a step takes what the flat profile says of a full one."""
    hands, take = Hands(), TrainingStep.take

    full = flat().full_step_seconds

    def slow(self: TrainingStep, batch: Batch) -> float:
        hands.seconds += full
        return take(self, batch)

    monkeypatch.setattr(trainer, "clock_for", lambda device, kind: hands)
    monkeypatch.setattr(TrainingStep, "take", slow)
    return hands


def taking(hands: Hands, seconds: float, act: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any, **named: Any) -> Any:
        hands.seconds += seconds
        return act(*arguments, **named)

    return slow


def flat() -> CostProfile:
    return flat_profile(chain(), vectors(1)[0])


def with_ten_steps() -> tuple[ElasticTrainer, float]:
    """A trainer whose deadline pays for ten full steps, and the seconds of one."""
    full = flat().full_step_seconds
    made = trainer_of(
        chain(), vectors(1)[0], ALL, budget=Budget(deadline=10 * full),
        closed_loop=True,
    )  # fmt: skip
    return made, full


@pytest.mark.parametrize(("estimate", "steps"), [(0.0, 10), (3.0, 7), (6.5, 3)])
def test_the_estimate_of_a_first_fit_is_inside_its_deadline(
    clock: Hands, monkeypatch: pytest.MonkeyPatch, estimate: float, steps: int
) -> None:
    profile = flat()
    full = profile.full_step_seconds
    made = taking(clock, estimate * full, lambda *given, **named: profile)
    monkeypatch.setattr(trainer, "costs_for", made)
    first = ElasticTrainer(chain(), loss_fn, sgd, budget=Budget(deadline=10 * full), policy="full")
    report = first.fit(vectors(20))
    assert report.steps == steps
    assert report.selection_seconds == pytest.approx(estimate * full)


@pytest.mark.parametrize(("probe", "steps"), [(0.0, 10), (2.0, 8)])
def test_a_probe_is_inside_the_deadline(
    clock: Hands, monkeypatch: pytest.MonkeyPatch, probe: float, steps: int
) -> None:
    made, full = with_ten_steps()
    due = iter([True])
    monkeypatch.setattr(made.planner, "probe_due", lambda *given: next(due, False))
    asked = taking(clock, probe * full, made.planner.measure_importance)
    monkeypatch.setattr(made.planner, "measure_importance", asked)
    assert made.fit(vectors(20)).steps == steps


@pytest.mark.parametrize(("planning", "steps"), [(0.0, 10), (4.0, 6)])
def test_making_a_plan_is_inside_the_deadline(
    clock: Hands, monkeypatch: pytest.MonkeyPatch, planning: float, steps: int
) -> None:
    made, full = with_ten_steps()
    monkeypatch.setattr(made.planner, "plan", taking(clock, planning * full, made.planner.plan))
    assert made.fit(vectors(20)).steps == steps


@pytest.mark.parametrize(("copying", "steps"), [(0.0, 10), (4.0, 6)])
def test_copying_the_weights_that_a_fit_starts_from_is_inside_the_deadline(
    clock: Hands, monkeypatch: pytest.MonkeyPatch, copying: float, steps: int
) -> None:
    made, full = with_ten_steps()
    copied = taking(clock, copying * full, FitStart.about_to_train)
    monkeypatch.setattr(FitStart, "about_to_train", copied)
    assert made.fit(vectors(20)).steps == steps


def test_what_stands_before_the_first_step_is_inside_the_deadline(
    clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, full = with_ten_steps()
    monkeypatch.setattr(trainer, "FitStart", taking(clock, 3 * full, FitStart))
    # As much is kept back for the end, until it is known that it takes no time here.
    assert [made.fit(vectors(20)).steps for _ in range(2)] == [4, 7]


def test_making_ready_is_told_apart_from_choosing(
    clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, full = with_ten_steps()
    monkeypatch.setattr(trainer, "FitStart", taking(clock, full, FitStart))
    plan_applied, plans = fit.plan_applied, list[Plan]()

    def slowly(plan: Plan, model: Any) -> Any:
        plans.append(plan)
        return taking(clock, 0.5 * full, plan_applied)(plan, model)

    monkeypatch.setattr(fit, "plan_applied", slowly)
    # What a policy looks at before its first plan, and the plan.
    monkeypatch.setattr(made.planner, "begin", taking(clock, 0.5 * full, made.planner.begin))
    monkeypatch.setattr(made.planner, "plan", taking(clock, 2 * full, made.planner.plan))
    report = made.fit(vectors(20))
    ready = (1 + 0.5 * len(plans)) * full
    assert plans and report.preparing_seconds == pytest.approx(ready)
    assert report.selection_seconds == pytest.approx(ready + 2.5 * full)


@pytest.mark.parametrize(
    ("planning", "groups", "most"),
    [(0.0, 4, 2), (1.3, 1, 2), (1.5, 1, 2), (1.65, 1, 2.4), (9, 1, 9.7)],
)
def test_where_choosing_leaves_no_time_for_a_step_of_the_plan_the_head_is_trained_for_one(
    clock: Hands,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    planning: float,
    groups: int,
    most: float,
) -> None:
    """Choosing does not cost the round."""
    full, take, begin = flat().full_step_seconds, TrainingStep.take, TrainingStep.begin
    made = trainer_of(
        chain(), vectors(1)[0], ALL, budget=Budget(deadline=2 * full),
        closed_loop=True,
    )  # fmt: skip
    monkeypatch.setattr(made.planner, "plan", taking(clock, planning * full, made.planner.plan))

    plans: list[Plan] = []

    def beginning(self: TrainingStep, plan: Plan, *more: Any) -> None:
        plans.append(plan)
        begin(self, plan, *more)

    def by_plan(self: TrainingStep, batch: Batch) -> float:
        # The clock of all tests has every step take a full one.
        clock.seconds += plans[-1].predicted_step_seconds - full
        return take(self, batch)

    monkeypatch.setattr(TrainingStep, "begin", beginning)
    monkeypatch.setattr(TrainingStep, "take", by_plan)
    report = made.fit(vectors(20))
    if planning:
        assert report.plan.trained_parameters == ("6.weight", "6.bias") and report.steps == 1
        assert report.based_on == "the head, as choosing took all of the time"
    assert next(int(plan.mask.sum()) for _, plan in report.plans) == groups
    assert report.plan is report.plans[0][1] and report.steps >= 1
    assert clock.seconds <= most * full * (1 + 1e-9)
    assert ("its deadline was" in caplog.text) is (planning == 9)


def test_what_comes_after_the_last_step_is_kept_back_by_the_next_fit(
    clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, full = with_ten_steps()
    monkeypatch.setattr(fit.Fit, "_refuse_overflow", taking(clock, 2 * full, lambda _: None))
    assert [made.fit(vectors(20)).steps for _ in range(3)] == [10, 8, 8]
    began = clock.seconds
    made.fit(vectors(20))
    assert clock.seconds - began == pytest.approx(10 * full)


def test_a_deadline_shorter_than_the_cheapest_step_is_refused(clock: Hands) -> None:
    made, full = with_ten_steps()
    made.budget = Budget(deadline=0.1 * full)
    made.planner.budget = made.budget
    with pytest.raises(BudgetError, match="does not pay for one step"):
        made.fit(vectors(20))


@pytest.mark.parametrize(("timed", "least", "most"), [(0.0, 10, 10), (5.0, 5, 6)])
def test_a_full_pass_that_is_timed_is_inside_the_speedup(
    clock: Hands, monkeypatch: pytest.MonkeyPatch, timed: float, least: int, most: int
) -> None:
    # Of a plan that trains everything no full pass is timed: its own steps tell.
    made = trainer_of(
        chain(), vectors(1)[0], ["6", "4"], budget=Budget(speedup=2.0),
        closed_loop=True,
    )  # fmt: skip
    assert made.profile is not None
    made.profile = replace(made.profile, estimated=True)
    full, passes = made.profile.full_step_seconds, []

    def ratio(*given: Any) -> float:
        clock.seconds += timed * full if not passes else 0.0
        passes.append(given)
        return 1.0

    monkeypatch.setattr("fl_elastic.training.measured.full_pass_ratio", ratio)
    steps = made.fit(vectors(20)).steps
    assert passes and least <= steps <= most


def test_a_full_pass_that_is_timed_gives_up_its_gradients_as_a_step_does(clock: Hands) -> None:
    # Of a model with a layer of 100 million weights that is a twentieth of a step.
    model, batch = chain(), vectors(1)[0]

    def gone() -> None:
        clock.seconds += 1.0

    def made(parameter: Tensor) -> None:
        weakref.finalize(parameter.grad, gone)

    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(made)
    profile = replace(flat(), optimizer_seconds=np.zeros(len(flat())))
    found = full_pass_ratio(model, loss_fn, batch, profile, clock)
    assert found == pytest.approx(len(parameters) / profile.full_step_seconds)


def test_a_plan_for_which_no_time_is_left_is_none_of_the_fits_plans(
    clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = flat().full_step_seconds
    made = trainer_of(
        chain(), vectors(1)[0], ["6"], ["4"], budget=Budget(deadline=10 * full),
        closed_loop=True, below_cosine=2.0,
    )  # fmt: skip
    asked: list[float] = []

    def due(*given: Any) -> bool:
        return clock.seconds >= 4 * full and not asked

    def probe(*given: Any) -> bool:
        asked.append(clock.seconds)
        clock.seconds += 7 * full
        return True

    monkeypatch.setattr(made.planner, "probe_due", due)
    monkeypatch.setattr(made.planner, "measure_importance", probe)
    report = made.fit(vectors(20))
    assert asked and report.steps == 4
    assert [start for start, _ in report.plans] == [0]
    assert report.plan is report.plans[0][1]
    assert set(made.update().deltas) == {"6.weight", "6.bias"}


@pytest.mark.parametrize(
    ("groups", "slower", "told"),
    [(["6", "4"], 0.0, 0.0), (["6", "4"], 1.0, 1.0), (["6", "4"], 4.0, 4.0), (["6"], 40.0, 1.0)],
)
def test_a_full_step_is_known_with_what_the_optimiser_really_takes(
    clock: Hands, monkeypatch: pytest.MonkeyPatch, groups: list[str], slower: float, told: float
) -> None:
    made = trainer_of(
        chain(), vectors(1)[0], groups, budget=Budget(speedup=2.0),
        closed_loop=True,
    )  # fmt: skip
    assert made.profile is not None
    made.profile = replace(
        made.profile, estimated=True, optimizer_seconds=np.linspace(1, 2, len(made.profile)),
    )  # fmt: skip
    optimizing, full = made.profile.optimizer_seconds, made.profile.full_step_seconds
    trained = [group.name in groups for group in made.profile.graph.groups]
    step = torch.optim.SGD.step
    share = float(optimizing[trained].sum())
    monkeypatch.setattr(torch.optim.SGD, "step", taking(clock, slower * share, step))
    # By this clock the passes take nothing.
    ratio = made.fit(vectors(20)).full_ratio
    # Of one small group its call is all that is seen, and says nothing of the others.
    assert ratio == pytest.approx(told * float(optimizing.sum()) / full if told else 1.0)


class Slow:
    """A loader that takes its time for each batch, and knows its length or does not."""

    def __init__(self, hands: Hands, seconds: float, count: int, sized: bool) -> None:
        self.hands, self.seconds, self.batches = hands, seconds, vectors(count)
        self.read = 0
        if sized:
            self.dataset_size = count * 4
            self.__class__ = SlowWithLength

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.hands.seconds += self.seconds
            self.read += 1
            yield batch


class SlowWithLength(Slow):
    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize(
    ("loading", "sized"), [(0.0, True), (0.5, True), (1.0, False), (4.0, False)]
)
@pytest.mark.parametrize("policy", ["full", "last_k", "elastic"])
def test_a_deadline_holds_for_reading_the_data_as_well(
    clock: Hands, monkeypatch: pytest.MonkeyPatch, loading: float, sized: bool, policy: str
) -> None:
    """Ten full steps' time: each batch read takes its part of it, also the first and those that are counted."""
    profile = flat()
    full = profile.full_step_seconds
    plans: list[Plan] = []
    begin, take = TrainingStep.begin, TrainingStep.take

    def beginning(self: TrainingStep, plan: Plan, *more: Any) -> None:
        plans.append(plan)
        begin(self, plan, *more)

    def by_plan(self: TrainingStep, batch: Batch) -> float:
        # The clock of all tests has every step take a full one.
        clock.seconds += plans[-1].predicted_step_seconds - (1 + loading) * full
        return take(self, batch)

    monkeypatch.setattr(TrainingStep, "begin", beginning)
    monkeypatch.setattr(TrainingStep, "take", by_plan)
    made = ElasticTrainer(
        chain(), loss_fn, sgd, budget=Budget(deadline=10 * full), policy=policy, profile=profile
    )
    loader = Slow(clock, loading * full, 20, sized)
    report = made.fit(loader)
    assert clock.seconds <= 10 * full * (1 + 1e-9)
    assert report.steps >= 1
    assert report.seconds + report.selection_seconds <= 10 * full * (1 + 1e-9)
    if loading:
        spent = report.seconds + report.selection_seconds
        assert spent == pytest.approx(clock.seconds, abs=1.5 * loading * full)
        # Nothing is read that is not trained on, but for the first batches and a tenth for counting.
        assert loader.read <= report.steps + made.planner.batches_needed + 3


def test_a_speed_up_is_one_of_steps_however_slow_the_loader_is(clock: Hands) -> None:
    made = ElasticTrainer(
        chain(), loss_fn, sgd, budget=Budget(speedup=1.0), policy="full", profile=flat()
    )
    report = made.fit(Slow(clock, 5.0, 20, True))
    assert report.steps == 20 and report.seconds == pytest.approx(20 * flat().full_step_seconds)


def test_what_a_kept_profile_says_of_steps_does_not_hold_the_loader(clock: Hands) -> None:
    profile = replace(flat(), estimated=True)
    full = profile.full_step_seconds
    made = ElasticTrainer(
        chain(), loss_fn, sgd, budget=Budget(deadline=40 * full), policy="full", profile=profile
    )
    made.fit(Slow(clock, full, 20, True))
    assert made.profile is not None
    assert made.profile.full_step_seconds == pytest.approx(full, rel=0.05)
