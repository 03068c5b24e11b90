"""What a simulation says that estimating costs and making a plan take is part of a fit's time and of its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from small_models import chain, flat_profile, loss_fn, sgd, vectors
from trainer_settings import options_of, settings_of, state_with

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, SettingError
from fl_elastic.groups import Batch
from fl_elastic.training import ElasticTrainer, FitReport, Timing
from fl_elastic.training.planner import Planner

# A full step of the chain takes 15 s, one of its head 6.
STEPS, FULL, HEAD = 10, 15.0, 6.0


def report_of(
    budget: Budget,
    policy: str = "elastic",
    constants: Mapping[str, float] = MappingProxyType({}),
    **changes: object,
) -> FitReport:
    options: dict[str, Any] = {"closed_loop": False, "full_update_every": 0} | changes
    model, batches = chain(), vectors(STEPS)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=budget, policy=policy, profile=flat_profile(model, batches[0]),
        options=options_of(**options),
        # Scores at hand, so that no probe is due.
        state=state_with(("6", "4", "2", "0"), [1.0] * 4, [0] * 4, 0, 10_000, **constants),
    )  # fmt: skip
    return trainer.fit(batches)


def test_a_slower_planner_leaves_fewer_steps_under_the_same_deadline() -> None:
    deadline = 9 * HEAD
    steps = []
    for planning in (0.0, 10.0, 25.0):
        report = report_of(Budget(deadline=deadline), "head", planning_seconds=planning)
        assert report.choosing_seconds == planning
        assert report.predicted_seconds == report.steps * HEAD + planning <= deadline
        steps.append(report.steps)
    assert steps == [9, 7, 4]


def test_an_estimate_of_the_costs_is_inside_the_deadline_too() -> None:
    report = report_of(
        Budget(deadline=9 * HEAD), "head", profile_seconds=20.0, planning_seconds=5.0
    )
    assert report.steps == 4 and report.predicted_seconds == 4 * HEAD + 25.0
    assert report.choosing_seconds == 5.0


def test_a_plan_knows_what_making_it_leaves() -> None:
    """With planning taken off, the plan is that of the shorter deadline."""
    charged = report_of(Budget(deadline=110.0), planning_seconds=20.0)
    shorter = report_of(Budget(deadline=90.0))
    assert charged.plan.mask.tolist() == shorter.plan.mask.tolist()
    assert charged.steps == shorter.steps
    assert charged.predicted_seconds == shorter.predicted_seconds + 20.0 <= 110.0


@pytest.mark.parametrize("plans", [2, 5])
def test_each_plan_that_is_made_is_charged(plans: int) -> None:
    """Chosen anew every so many steps, and always drifted: a probe and a plan each time."""
    taken = [
        report_of(
            Budget(deadline=140.0), planning_seconds=planning,
            constants={"probe_every": STEPS // plans, "below_cosine": 2.0},
        )
        for planning in (0.0, 3.0)
    ]  # fmt: skip
    for report in taken:
        assert report.predicted_seconds - report.choosing_seconds <= 140.0
    assert taken[1].choosing_seconds >= 3.0 * len(taken[1].plans)


def test_a_speed_up_pays_with_half_of_its_time_at_the_most() -> None:
    free, charged = (
        report_of(Budget(speedup=2.0), "head", planning_seconds=planning)
        for planning in (0.0, 1000.0)
    )
    assert 1 <= charged.steps < free.steps
    assert charged.predicted_seconds == charged.steps * HEAD + 1000.0


def test_where_there_is_nothing_to_choose_no_plan_is_charged() -> None:
    for policy, deadline in (("elastic", STEPS * FULL), ("full", 5 * FULL)):
        report = report_of(Budget(deadline=deadline), policy, planning_seconds=FULL)
        assert report.choosing_seconds == 0.0 and report.predicted_seconds == deadline
    assert report_of(Budget(), planning_seconds=FULL).choosing_seconds == 0.0


def test_choosing_that_uses_a_deadline_up_does_not_cost_the_round() -> None:
    for charged in (
        {"profile_seconds": 60.0},
        {"planning_seconds": 60.0},
        {"planning_seconds": 50.0},
    ):
        report = report_of(Budget(deadline=55.0), **charged)
        assert report.steps == 1 and int(report.plan.mask.sum()) == 1
        assert report.predicted_seconds > 50.0
    with pytest.raises(BudgetError, match="does not pay for one step"):
        report_of(Budget(deadline=1.0), planning_seconds=0.5)


def test_where_times_are_measured_nothing_is_charged_besides() -> None:
    report = report_of(
        Budget(deadline=1e6), profile_seconds=9e5, planning_seconds=9e5, closed_loop=True
    )
    assert report.steps == STEPS and report.choosing_seconds < 9e5


def test_seconds_below_none_are_refused() -> None:
    for name in ("profile_seconds", "planning_seconds"):
        with pytest.raises(SettingError, match=f"{name} -1"):
            Timing(**{name: -1.0})


def test_a_plan_too_dear_for_the_deadline_is_not_made_but_tried_now_and_then() -> None:
    batches, model = vectors(STEPS), chain()
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(deadline=100.0), profile=flat_profile(model, batches[0]),
        options=options_of(full_update_every=1000, closed_loop=False, planning_seconds=6.0),
        # All worth is in the head: a choice trains nothing else.
        state=state_with(
            ("6", "4", "2", "0"), [1.0, 0.0, 0.0, 0.0], [0] * 4, 0, 10_000, exploration=0.0
        ),
    )  # fmt: skip
    reports = [trainer.fit(batches) for _ in range(5)]
    told = [report.based_on for report in reports]
    too_long = "everything, as choosing takes too long"
    assert told == ["remembered importance", too_long, too_long, "remembered importance", too_long]
    # Seconds of a plan: 6, 5.4 and 4.86 as they are forgotten, of a hundred.
    for report in reports:
        chosen = report.based_on != too_long
        assert report.choosing_seconds == (6.0 if chosen else 0.0)
        assert report.predicted_seconds <= 100.0
        assert chosen or report.plan.mask.all()


@pytest.mark.parametrize("speedup", [1.5, 3.0])
def test_later_probes_are_a_hundredth_of_the_time_over_many_fits(
    speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importance that always drifts asks for a probe every ten steps; two full steps each are charged."""
    probes = []
    real = Planner.measure_importance

    def counted(planner: Planner, batches: Sequence[Batch]) -> bool:
        probes.append(planner.state.steps_since_probe)
        return real(planner, batches)

    monkeypatch.setattr(Planner, "measure_importance", counted)
    model, batches = chain(), vectors(60)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=speedup),
        profile=flat_profile(model, batches[0]),
        **settings_of(
            full_update_every=0, closed_loop=False, probe_every=10, below_cosine=2.0
        ),
    )  # fmt: skip
    taken = sum(trainer.fit(batches).predicted_seconds for _ in range(10))
    assert probes
    assert 2 * FULL * (len(probes) - 1) <= 0.01 * taken * 1.05
