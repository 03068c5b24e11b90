"""What choosing takes is part of simulated time, and of the deadline, for every method that chooses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from choosing_costs import flat_choosing, steady
from slow_ones import slow_unless

from fl_elastic.errors import PlanError, ScenarioError
from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.engine.choosing import ChoosingCosts, chooses, measure_choosing
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.progress import LoggedProgress
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation, run_method
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario import Scenario

STEPS, SLOWEST = 12, 3.0
CHOOSING = ("elastic", "last_k", "fedel", "timelyfl", "random_layers")
FREE = ("wait", "fewer")
# A twentieth of the fastest client's training, as in the benchmark.
SENDING = 0.05


def table(slowest: float = SLOWEST, count: int = 2, **training: Any) -> dict[str, Any]:
    return {
        "title": "small",
        "data": {"dataset": "digits", "partition": "iid", "train_limit": 240, "test_limit": 30},
        "model": {"name": "digits_cnn"},
        "training": {"rounds": 2, "batch_size": 4, "learning_rate": 0.03, "local_steps": STEPS}
        | training,
        "deadline": {"quantile": 0.0},
        "fleet": [
            {"name": "fast", "device": "laptop", "slowdown": 1.0, "count": count},
            {"name": "slow", "device": "laptop", "slowdown": slowest, "count": count},
        ],
        "methods": [*FREE, *CHOOSING],
        "method": {
            "wait": {"policy": "full", "budgeted": False, "stragglers": "wait"},
            "fewer": {"policy": "full", "budgeted": True},
            "elastic": {"deep_every": 0},
            "last_k": {},
        }
        | {name: {"peer": name} for name in ("fedel", "timelyfl", "random_layers")},
    }


def scenario(profile: CostProfile | None = None, **changes: Any) -> Scenario:
    made = table(**changes)
    bandwidth = 1e9
    if profile is not None:
        training = STEPS * profile.full_step_seconds
        bandwidth = float(profile.parameter_bytes.sum()) / (SENDING * training)
    for entry in made["fleet"]:
        entry |= {"uplink_bytes_per_second": bandwidth, "downlink_bytes_per_second": bandwidth}
    return Scenario.from_json(json.dumps(made))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return steady(measure_profile(scenario(), None))


def ran(
    folder: Path, made: Scenario, profile: CostProfile, method: str, choosing: ChoosingCosts | None
) -> RunResult:
    simulation = Simulation(made, folder)
    (section,) = (each for each in made.methods if each.name == method)
    grid = InProcessGrid(len(made.clients), simulated_client_app())
    return run_method(simulation, grid, LoggedProgress(), section, 0, profile, choosing)


def charged(cell: RunResult) -> tuple[float, float]:
    return cell.profile_seconds, cell.choosing_seconds


@pytest.mark.parametrize("method", slow_unless(("elastic", "fedel").__contains__, CHOOSING))
def test_the_profile_is_charged_once_and_each_choice_where_one_is_made(
    method: str, tmp_path: Path, profile: CostProfile
) -> None:
    made, full = scenario(profile, rounds=3), profile.full_step_seconds
    costs = flat_choosing(made, profile=1.5 * full, plan=0.25 * full)
    cell = ran(tmp_path, made, profile, method, costs)
    clients = 2 * (1.0 + SLOWEST)
    assert cell.rejected == 0
    # Once a client, in its own time, whatever the rounds.
    assert cell.profile_seconds == pytest.approx(1.5 * full * clients)
    # Fast clients choose in the first round alone, where the profile takes some of their time.
    choices = clients + 2 * 2 * SLOWEST
    plans = 0.25 * full * choices
    if method == "fedel":
        # Its probe is paid for as well, and its exits fit sooner than the whole model.
        assert cell.choosing_seconds > 0
    else:
        assert cell.choosing_seconds == pytest.approx(plans)
    assert cell.client_seconds > sum(charged(cell))


@pytest.mark.parametrize(
    "method", slow_unless({"elastic", "wait"}.__contains__, [*CHOOSING, *FREE])
)
def test_charges_are_inside_the_deadline(method: str, tmp_path: Path, profile: CostProfile) -> None:
    made, full = scenario(profile, count=1), profile.full_step_seconds
    costs = flat_choosing(made, profile=1.5 * full, plan=0.5 * full)
    one, other = (
        ran(tmp_path / n, made, profile, method, c) for n, c in (("a", None), ("b", costs))
    )
    if method in FREE:
        assert charged(other) == (0.0, 0.0) and other.simulated_seconds > 0
    if method == "wait":
        return
    # The deadline is the fast clients' whole round; the way down is not part of it.
    deadline = STEPS * full * (1 + SENDING)
    for cell in (one, other):
        sent = cell.spent["downlink_bytes"] / (2 * len(made.clients))
        down = sent / made.clients[0].device.downlink_bytes_per_second
        assert cell.simulated_seconds / 2 <= (deadline + down) * 1.001
    if method in CHOOSING:
        slow = [[s.share for s in cell.steps if s.device == "slow"] for cell in (one, other)]
        # Three steps' time at the full model, of which half a step and once one and a half more are gone.
        assert sum(charged(other)) > sum(charged(one))
        assert len(slow[1]) <= len(slow[0])


@pytest.mark.slow
def test_a_slower_planner_leaves_fewer_steps(tmp_path: Path, profile: CostProfile) -> None:
    """A policy that always trains the head: nothing but the number of steps can change."""
    made = scenario(profile, slowest=12.0)
    section = json.loads(made.to_json())
    section["method"]["elastic"]["policy"] = "head"
    made, full = Scenario.from_json(json.dumps(section)), profile.full_step_seconds
    taken = [
        sum(
            step.share
            for step in ran(
                tmp_path / str(plan),
                made,
                profile,
                "elastic",
                flat_choosing(made, plan=plan * full),
            ).steps
            if step.device == "slow"
        )
        for plan in (0.0, 0.4)
    ]
    assert 0 < taken[1] < taken[0]


def test_a_first_fit_that_is_lost_to_its_profile_lasts_to_the_deadline(
    tmp_path: Path, profile: CostProfile
) -> None:
    made, full = scenario(profile, rounds=2), profile.full_step_seconds
    cell = ran(tmp_path, made, profile, "elastic", flat_choosing(made, profile=5 * full))
    # A third of twelve steps does not pay for five; in the second round everybody knows its costs.
    assert cell.rejected == 2 and cell.coverage["slow"][0] == [0.0] * len(profile)
    assert max(cell.coverage["slow"][1]) == 1.0
    assert cell.profile_seconds == pytest.approx(5 * full * 2 * (1 + SLOWEST))
    assert cell.rows()[1]["simulated_seconds"] >= STEPS * full * (1 + SENDING) * 0.99


@pytest.mark.slow
def test_a_deadline_below_one_full_step_is_not_overrun(
    tmp_path: Path, profile: CostProfile
) -> None:
    """Twelve steps of the fastest are 0.75 of a full step of a device sixteen times slower."""
    made = scenario(profile, slowest=16.0)
    cell = ran(tmp_path, made, profile, "fewer", flat_choosing(made))
    assert cell.rejected == 4 and max(cell.coverage["slow"][-1]) == 0.0
    limit = 2 * STEPS * profile.full_step_seconds * (1 + 2 * SENDING)
    assert cell.simulated_seconds <= limit * 1.001
    whole = ran(tmp_path / "b", scenario(profile, slowest=7.5), profile, "fewer", None)
    # 1.6 steps, and their sending, are one: the rest is not carried over.
    assert {s.share for s in whole.steps if s.device == "slow"} == {1 / STEPS}
    assert whole.rejected == 0


def test_a_round_of_nobody_takes_time(tmp_path: Path, profile: CostProfile) -> None:
    """Else a run that lasts so many simulated seconds would never end."""
    section = json.loads(scenario(profile, rounds=3).to_json())
    section["deadline"] = {"seconds": 1e-6}
    made = Scenario.from_json(json.dumps(section))
    cell = ran(tmp_path, made, profile, "fewer", None)
    assert cell.rejected == 12 and cell.simulated_seconds > 0


@pytest.mark.slow
def test_what_choosing_takes_is_measured_where_there_is_a_choice(profile: CostProfile) -> None:
    made = scenario(profile)
    costs = measure_choosing(made, None, profile)
    assert (
        [m.name for m in made.methods if chooses(m)] == list(CHOOSING) == list(costs.plan_seconds)
    )
    assert costs.profile_seconds > 0
    assert all(set(each) == {"fast", "slow"} for each in costs.plan_seconds.values())
    assert all(taken > 0 for each in costs.plan_seconds.values() for taken in each.values())
    assert ChoosingCosts.from_json(costs.to_json()) == costs
    assert costs.head_seconds is None
    with pytest.raises(ScenarioError, match="a head in closed form takes was not measured"):
        _ = costs.of_a_head
    methods = [
        replace(each, round_zero="closed_form") if each.name == "elastic" else each
        for each in made.methods
    ]
    only = tuple(each for each in methods if each.name == "elastic")
    solved = measure_choosing(replace(made, methods=only), None, profile)
    # The two parts of an answer are told by a difference, which is small for a small model.
    assert solved.of_a_head.answering(16) > 0
    for name in ("product", "row", "solving", "trying", "ranking"):
        assert asdict(solved.of_a_head)[name] > 0
    assert ChoosingCosts.from_json(solved.to_json()) == solved


def test_a_method_that_was_edited_is_measured_again(profile: CostProfile) -> None:
    made = scenario(profile)
    first = measure_choosing(made, None, profile)
    again = measure_choosing(made, None, profile, ChoosingCosts.from_json(first.to_json()))
    assert again == first
    edited = replace(made, methods=tuple(
        replace(each, importance="fisher") if each.name == "elastic" else each
        for each in made.methods
    ))  # fmt: skip
    found = measure_choosing(edited, None, profile, first)
    same = {name for name in CHOOSING if found.plan_seconds[name] == first.plan_seconds[name]}
    assert same == set(CHOOSING) - {"elastic"}


def test_seconds_that_were_not_measured_are_no_zero(tmp_path: Path, profile: CostProfile) -> None:
    made = scenario(profile)
    (elastic,) = (each for each in made.methods if each.name == "elastic")
    with pytest.raises(ScenarioError, match="elastic on slow was not measured"):
        ChoosingCosts().plan(elastic, "slow")
    for damaged in ("", "{}", '{"profile_seconds": 1, "plan_seconds": []}'):
        path = tmp_path / "choosing.json"
        path.write_text(damaged)
        with pytest.raises(ScenarioError, match="cannot be read"):
            ChoosingCosts.load(path)
    with pytest.raises(ScenarioError, match="cannot read"):
        ChoosingCosts.load(tmp_path / "missing.json")


def test_a_policy_that_cannot_train_the_model_is_refused_before_the_first_round(
    profile: CostProfile,
) -> None:
    section = json.loads(scenario(profile).to_json())
    section["method"]["fewer"]["policy"] = "e_vit"
    made = Scenario.from_json(json.dumps(section))
    with pytest.raises(PlanError, match="policy 'e_vit' drops tokens"):
        measure_choosing(made, None, profile)
