"""Holding the pace, with made-up times."""

from __future__ import annotations

import math

import pytest

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic.planning import Plan
from fl_elastic.training.budget_control import BudgetControl
from fl_elastic.training.report import StepLog

GROUP = TensorGroup("only", ("only.weight",), ((1,),), GroupKind.LINEAR)
WINDOW = 20


def corrects(control: BudgetControl, plan: Plan) -> bool:
    """Look at the pace, and plan by it where it misses."""
    pace = control.missed_pace(plan)
    if pace is not None:
        control.correct_pace(pace)
    return pace is not None


def plan_of(predicted: float, allowed: float = math.inf) -> Plan:
    return Plan("test", (GROUP,), (Mode.FULL,), 2 * predicted, predicted, 0.1, allowed, 0.0)


def control_of(
    allowed: float, steps: int, *, correct: bool = True, relative: bool = False
) -> BudgetControl:
    return BudgetControl(allowed, steps, correct=correct, relative=relative)


def take(
    control: BudgetControl,
    steps: int,
    seconds: float,
    *,
    whole: bool = True,
    predicted: float = 0.0,
) -> None:
    for _ in range(steps):
        control.record(seconds, whole_batch=whole, predicted_seconds=predicted)


@pytest.mark.parametrize("correct", [True, False])
def test_no_step_is_taken_that_is_not_paid_for(correct: bool) -> None:
    plan = plan_of(100.0, allowed=0.1)
    assert control_of(1.0, 10, correct=correct).steps_left(plan) == 0
    assert control_of(99.0, 10, correct=correct).steps_left(plan) == 0
    control = control_of(100.0, 10, correct=correct)
    assert control.steps_left(plan) == 1
    take(control, 1, 100.0, predicted=100.0)
    assert control.steps_left(plan) == 0


def test_open_loop_follows_the_prediction_whatever_is_measured() -> None:
    control = control_of(25.0, 50, correct=False)
    plan = plan_of(1.0, allowed=0.5)
    assert control.steps_left(plan) == 25
    take(control, 10, 99.0, predicted=1.0)
    assert control.steps_left(plan) == 15
    assert not corrects(control, plan) and control.correction == 1.0
    take(control, 15, 99.0, predicted=1.0)
    assert control.steps_left(plan) == 0


def test_closed_loop_predicts_until_it_has_measured_a_window() -> None:
    control = control_of(30.0, 100)
    plan = plan_of(1.0)
    assert control.steps_left(plan) == 30
    take(control, WINDOW - 1, 0.5)
    assert control.steps_left(plan) == math.floor(30 - 9.5)
    take(control, 1, 0.5)
    assert control.steps_left(plan) == math.floor((30 - 10) / 0.5)


def test_a_speedup_has_half_a_step_of_grace_and_a_deadline_none() -> None:
    assert control_of(10.4, 100, relative=True).steps_left(plan_of(1.0)) == 10
    assert control_of(10.6, 100, relative=True).steps_left(plan_of(1.0)) == 11
    assert control_of(10.6, 100).steps_left(plan_of(1.0)) == 10
    assert control_of(11.0, 100).steps_left(plan_of(1.0)) == 11


@pytest.mark.parametrize("slow", [2, 3, 6])
def test_the_last_step_before_a_deadline_must_fit_also_if_it_is_slow(slow: int) -> None:
    control, plan = control_of(30.0, 100), plan_of(1.0)
    for step in range(100):
        if not control.steps_left(plan):
            break
        # Every so many steps one takes three times as long.
        take(control, 1, 3.0 if step % slow == slow - 1 else 1.0)
    assert 24 < control.spent <= 30.0


@pytest.mark.parametrize("longest", [5.0, 9.0])
def test_the_last_step_before_a_deadline_must_fit_also_on_a_longer_batch(longest: float) -> None:
    control, plan = control_of(64.0, 100), plan_of(1.0)
    for step in range(100):
        if not control.steps_left(plan):
            break
        # The shape of the first batch is that of every fifth.
        length = 1.0 + (step % 5) * (longest - 1.0) / 4
        take(control, 1, length, whole=length == 1.0, predicted=1.0)
    assert 64.0 - longest <= control.spent <= 64.0


def test_a_new_plan_is_taken_to_be_as_uneven_as_the_one_before() -> None:
    control, plan = control_of(100.0, 1000), plan_of(1.0)
    for step in range(WINDOW):
        take(control, 1, 3.0 if step % 4 == 3 else 1.0)
    assert control.spent == 30.0
    take(control, 2, 33.75)
    control.replanned()
    assert control.spent == 97.5
    # 2.5 s are left: enough for one of the usual steps, not for one of the slow ones.
    assert control.steps_left(plan) == 0


def test_a_new_plans_first_step_is_expected_at_the_measured_pace() -> None:
    control, plan = control_of(40.0, 100), plan_of(1.0, allowed=1.0)
    take(control, WINDOW, 1.9)
    assert corrects(control, plan)
    control.replanned()
    # The device takes 1.9 times what plans say; 2 s are left for a plan of 1.5.
    assert control.steps_left(plan_of(1.5)) == 0
    assert control.steps_left(plan_of(1.0)) >= 1


def test_one_pause_does_not_end_training_before_a_deadline() -> None:
    control, plan = control_of(100.0, 100), plan_of(1.0)
    take(control, 9, 1.0)
    take(control, 1, 60.0)
    take(control, 10, 1.0)
    assert control.steps_left(plan) == 21


def test_steps_left_never_exceed_those_requested() -> None:
    control = control_of(1e6, 40)
    take(control, 39, 1e-3)
    assert control.steps_left(plan_of(1.0)) == 1
    take(control, 1, 1e-3)
    assert control.steps_left(plan_of(1.0)) == 0


def test_smaller_batches_cost_time_but_do_not_enter_the_estimate() -> None:
    control = control_of(100.0, 100)
    take(control, WINDOW, 1.0)
    take(control, 30, 0.01, whole=False)
    assert control.spent == pytest.approx(WINDOW + 0.3) and control.steps == 50
    plan = plan_of(1.0)
    assert control.steps_left(plan) == 50
    assert not corrects(control, plan)


def test_a_pace_that_is_met_wants_no_new_plan() -> None:
    control = control_of(100.0, 100)
    take(control, WINDOW, 1.015)
    assert not corrects(control, plan_of(1.0)) and control.correction == 1.0


@pytest.mark.parametrize("measured", [0.5, 1.5, 3.0])
def test_a_pace_that_is_missed_teaches_the_correction(measured: float) -> None:
    control = control_of(100.0, 100)
    plan = plan_of(1.0, allowed=1.0)
    take(control, WINDOW - 1, measured)
    assert not corrects(control, plan)
    take(control, 1, measured)
    assert corrects(control, plan) and control.corrected
    assert control.correction == pytest.approx(measured)


def test_after_a_new_plan_the_old_ones_times_are_forgotten() -> None:
    control = control_of(200.0, 100)
    take(control, WINDOW, 3.0)
    assert corrects(control, plan_of(1.0, allowed=2.0))
    control.replanned()
    assert not control.corrected and not corrects(control, plan_of(1.0, allowed=2.0))
    assert control.correction == 3.0 and control.spent == 60.0
    take(control, WINDOW, 1.5)
    # The new plan was predicted to take 0.5 s and takes three times that, as was already known.
    assert not corrects(control, plan_of(0.5, allowed=2.0))


def test_one_slow_step_is_no_reason() -> None:
    control = control_of(100.0, 100)
    take(control, WINDOW - 2, 1.0)
    take(control, 2, 40.0)
    assert not corrects(control, plan_of(1.0))


def test_a_plan_of_few_long_steps_is_left_alone() -> None:
    # It takes fewer steps by choice: each is longer than its share, and that is no miss.
    control = control_of(100.0, 100)
    plan = plan_of(4.0, allowed=1.0)
    assert control.steps_left(plan) == 25
    take(control, WINDOW, 4.0)
    assert not corrects(control, plan)
    assert control.steps_left(plan) == 5


def test_full_steps_are_timed_before_a_window_ends_and_ever_more_rarely() -> None:
    control = control_of(1000.0, 1000, relative=True)
    due = []
    for count in range(1, 400):
        take(control, 1, 1.0)
        if control.reference_due():
            due.append(count)
            control.reference(1.0)
    marks = (20, 40, 80, 160, 320)
    assert due == [count for mark in marks for count in range(mark - 4, mark + 1)]


@pytest.mark.parametrize(
    "control",
    [
        control_of(100.0, 1000, relative=False),
        control_of(100.0, 1000, correct=False, relative=True),
        control_of(math.inf, 1000, relative=True),
    ],
    ids=["deadline", "open loop", "no limit"],
)
def test_full_steps_are_timed_only_for_a_speedup_in_closed_loop(control: BudgetControl) -> None:
    take(control, 500, 1.0)
    assert not control.reference_due()


def test_a_device_that_slows_down_gets_more_seconds_for_the_same_speedup() -> None:
    control = control_of(100.0, 100, relative=True)
    plan = plan_of(1.0, allowed=1.0)
    take(control, WINDOW, 2.0)
    for ratio in (1.9, 2.0, 2.1):
        control.reference(ratio)
    assert control.drift == 2.0 and control.allowed_seconds(plan_of(1.0)) == 200.0
    assert not corrects(control, plan)
    assert control.steps_left(plan) == 80
    for _ in range(9):
        control.reference(1.0)
    assert control.drift == 1.0
    assert corrects(control, plan)


@pytest.mark.parametrize("later", [10.0, 0.1])
@pytest.mark.parametrize(("fraction", "share"), [(0.5, 1.0), (1.0, 0.5)])
def test_a_speedup_relates_to_full_steps_on_batches_of_the_same_lengths(
    later: float, fraction: float, share: float
) -> None:
    # A speed-up of 2 of full steps that take 1 s on the first batch and some like it, and so many on others.
    control, plan = control_of(20.0, 40, relative=True), plan_of(fraction)
    lengths = 10 * [1.0, later, later, later]
    for length in lengths:
        if control.steps_left(plan):
            whole = length == 1.0
            take(control, 1, fraction * length, whole=whole, predicted=fraction)
    assert control.steps == pytest.approx(share * len(lengths), abs=1)
    assert control.spent == pytest.approx(0.5 * sum(lengths), rel=0.1)
    assert control.mean_work == pytest.approx(sum(lengths) / len(lengths), rel=0.1)


def clock_of(*times: float) -> StepLog:
    ticks = iter([0.0, *times])
    return StepLog((4, 2), lambda: next(ticks), began=0.0)


def test_the_log_counts_steps_losses_and_times() -> None:
    import torch

    log = clock_of(0.0, 1.0, 5.0, 8.0, 10.0, 12.0, 20.0, 20.5)
    whole, part = (torch.zeros(4, 2), None), (torch.zeros(3, 2), None)
    plan = plan_of(0.7)
    stepped, passed_by = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    stepped.grad = torch.ones(1)
    results = []
    steps = [(whole, ["a"], 3.0), (whole, ["a", "b"], 2.0), (whole, ["b"], 1.0), (part, ["b"], 0.5)]
    for batch, names, loss in steps:
        results.append(log.step(batch, plan, loss, started=log.clock()))
        log.weights.append(len(batch[0]))
        log.count(dict.fromkeys(names, stepped) | {"c": passed_by})
    assert results == [(1.0, True), (3.0, True), (2.0, True), (0.5, False)]
    assert log.losses == [3.0, 2.0, 1.0, 0.5]
    assert log.mean_loss(2, summed=False) == pytest.approx((4 * 1.0 + 3 * 0.5) / 7)
    assert log.mean_loss(3, summed=True) == pytest.approx((2.0 + 1.0 + 0.5) / 11)
    assert log.tensor_steps == {"a": 2, "b": 3}
    assert log.seconds == 6.5 and log.predicted_seconds == pytest.approx(2.8)
    assert log.median_step_seconds == 2.0


def test_a_log_without_whole_batches_has_no_step_time() -> None:
    assert clock_of().median_step_seconds == 0.0


def nearly_full(control: BudgetControl, *seconds: float) -> None:
    for each in seconds:
        control.record(each, whole_batch=True, predicted_seconds=0.95, nearly_full=True)


def test_steps_that_train_nearly_everything_tell_what_a_full_step_takes() -> None:
    control = BudgetControl(10.0, 20, correct=True, relative=True, estimated=True, full_seconds=1.0)
    nearly_full(control, 1.9, 5.0)
    assert control.full_ratio == pytest.approx(2.0) and not control.reference_due()
    nearly_full(control, 1.9)
    # A speed-up of two of twenty steps, each twice as long as predicted: twenty of the profile's seconds.
    left = int((20.0 - 8.8) / 1.9 + 0.5)
    assert control.steps_left(plan_of(0.95)) == left


def test_a_deadline_knows_no_full_steps_to_be_compared_with() -> None:
    control = BudgetControl(10.0, 20, correct=True, relative=False, full_seconds=1.0)
    nearly_full(control, 1.9, 1.9)
    assert control.full_ratio is None and control.drift == 1.0


@pytest.mark.parametrize(("estimated", "share"), [(False, 0.02), (True, 0.125)])
def test_dear_full_steps_take_no_more_than_their_share_of_the_training(
    estimated: bool, share: float
) -> None:
    control = BudgetControl(
        1000.0, 5000, correct=True, relative=True, estimated=estimated, full_seconds=6.0
    )
    timed = []
    for count in range(1, 3000):
        take(control, 1, 1.0)
        if control.reference_due():
            timed.append(count)
            control.reference(1.0, seconds=6.0)
            assert 6.0 * len(timed) <= share * count or (estimated and timed == [2])
    assert len(timed) > 3


def test_no_plan_is_made_that_takes_more_than_it_saves() -> None:
    # Thirty steps are left, each a tenth of a second longer than allowed: three seconds.
    for planning, wanted in ((0.0, True), (0.7, True), (0.8, False)):
        control = control_of(50.0, 50, relative=True)
        control.planning_seconds = planning
        take(control, WINDOW, 1.1)
        assert corrects(control, plan_of(1.0, allowed=1.0)) == wanted


def test_after_corrections_the_next_one_waits_ever_longer() -> None:
    control = control_of(1000.0, 1000)
    waited = []
    speed = 2.0
    for _ in range(5):
        start = control.steps
        while not corrects(control, plan_of(1.0)):
            take(control, 1, speed)
        waited.append(control.steps - start)
        control.replanned()
        # Each plan misses by as much again.
        speed *= 1.5
    assert waited == [20, 20, 20, 40, 80]


def test_what_a_step_did_beyond_its_share_counts_as_spent_but_not_as_its_pace() -> None:
    control = control_of(100.0, 100)
    for _ in range(WINDOW):
        control.record(3.0, whole_batch=True, steady_seconds=1.0)
    assert control.spent == 3.0 * WINDOW
    assert not corrects(control, plan_of(1.0))
    assert control.steps_left(plan_of(1.0)) == 40
