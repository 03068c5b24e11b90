"""Scenarios whose devices come and go, by a trace and drawn for days and nights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from choosing_costs import ran, steady, with_costs

from fl_elastic.errors import ScenarioError
from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario import Scenario

STEPS, SLOWEST = 2, 4.0
HEAD = """
seeds = [0]
methods = ["wait", "zero", "fewer"]
target = {method = "wait"}

[data]
dataset = "digits"
train_limit = 120
test_limit = 30

[model]
name = "digits_cnn"

[training]
rounds = 3
batch_size = 4
local_steps = 2

[deadline]
quantile = 0.0

[method.fewer]
policy = "full"
budgeted = true

[method.wait]
policy = "full"
stragglers = "wait"

[method.zero]
policy = "head"
round_zero = "closed_form"
"""


def scenario(folder: Path, availability: str = "") -> Scenario:
    """Two devices, of which one is four times slower."""
    fleet = "".join(
        f'[[fleet]]\ndevice = "laptop"\nname = "{name}"\nslowdown = {slowdown}\n{availability}\n'
        for name, slowdown in (("fast", 1.0), ("slow", SLOWEST))
    )
    (folder / "scenario.toml").write_text(HEAD + fleet)
    return Scenario.load(folder / "scenario.toml")


def trace(folder: Path, *lines: tuple[int, float, float]) -> str:
    text = "".join(f"{client},{begins},{ends}\n" for client, begins, ends in lines)
    (folder / "trace.csv").write_text("client,from,to\n" + text)
    return 'availability = {trace = "trace.csv"}'


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> CostProfile:
    return steady(measure_profile(scenario(tmp_path_factory.mktemp("scenario")), None))


@pytest.fixture(autouse=True)
def same_costs(profile: CostProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    with_costs(monkeypatch, profile)


def numbers(cell: RunResult) -> list[float]:
    return [value for row in cell.history for value in row.values()]


@pytest.mark.slow
def test_a_trace_in_which_nobody_goes_away_changes_nothing(tmp_path: Path) -> None:
    plain = ran(scenario(tmp_path), tmp_path)
    said = trace(tmp_path, (0, 0.0, 1e9), (1, 0.0, 1e9))
    traced = ran(scenario(tmp_path, said), tmp_path)
    for method, cell in plain.items():
        assert numbers(traced[method]) == pytest.approx(numbers(cell), rel=1e-4)
        assert (traced[method].accepted, traced[method].rejected) == (cell.accepted, cell.rejected)


@pytest.mark.slow
def test_who_goes_away_in_a_round_is_lost_and_who_is_away_is_not_asked(
    tmp_path: Path, profile: CostProfile
) -> None:
    step = STEPS * profile.full_step_seconds
    # The slow one goes in the middle of its second round, which begins after four steps of the fast one.
    goes = SLOWEST * step * 1.5
    said = trace(tmp_path, (0, 0.0, 1e9), (1, 0.0, goes))
    cell = ran(scenario(tmp_path, said), tmp_path)["wait"]
    assert (cell.accepted, cell.rejected) == (4, 1)
    assert list(cell.rejections) == ["client failed: client … (slow) went away at second …"]
    times = [row["simulated_seconds"] for row in cell.history]
    # The third is that of the fast one alone.
    assert times == pytest.approx([0, SLOWEST * step, goes, goes + step], rel=0.05)
    assert {name: spent["rounds"] for name, spent in cell.clients.items()} == {"0": 3, "1": 1}


def test_a_run_waits_for_somebody_to_come(tmp_path: Path, profile: CostProfile) -> None:
    said = trace(tmp_path, (0, 100.0, 1e9), (1, 200.0, 1e9))
    cell = ran(scenario(tmp_path, said), tmp_path)["wait"]
    times = [row["simulated_seconds"] for row in cell.history]
    assert times[-1] == pytest.approx(100 + 3 * STEPS * profile.full_step_seconds, rel=0.05)
    assert cell.rejected == 0


def test_drawn_availability_is_part_of_what_sets_classes_apart(tmp_path: Path) -> None:
    made = scenario(tmp_path, "availability = {share = 0.4, days = 1}")
    assert Scenario.from_json(made.to_json()) == made
    first, second = made.devices.availabilities
    assert first != second and not made.devices.always_there
    table = json.loads(made.to_json())
    for entry, share in zip(table["fleet"], (0.2, 0.4), strict=True):
        entry |= {"name": "laptop", "slowdown": 1.0, "availability": {"share": share}}
    names = [client.device.name for client in Scenario.from_json(json.dumps(table)).clients]
    assert names == ["laptop, there for 0.2 of the time", "laptop, there for 0.4 of the time"]


@pytest.mark.parametrize(
    ("availability", "problem"),
    [
        ("availability = {}", "either a trace or a share"),
        ('availability = {share = 0.2, trace = "a.csv"}', "either a trace or a share"),
        ("availability = {share = 0.7}", "1 or more at the peak"),
        ("availability = {share = 0.2, swin = 0.1}", "did you mean 'swing'"),
    ],
)
def test_what_says_nothing_of_availability_is_refused(
    availability: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError, match=problem):
        scenario(tmp_path, availability)


def test_a_trace_without_a_client_is_refused(tmp_path: Path) -> None:
    made: Any = scenario(tmp_path, trace(tmp_path, (0, 0.0, 9.0)))
    with pytest.raises(ScenarioError, match="no line of client 1"):
        ran(made, tmp_path)
