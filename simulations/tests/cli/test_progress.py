"""What a simulation says of its progress: a line per round, with moving bars below it or without."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import fl_elastic_simulations
from fl_elastic_simulations.cli import simulate
from fl_elastic_simulations.cli.simulate import SimulationProgress
from fl_elastic_simulations.scenario import Scenario

DEMO = Path(fl_elastic_simulations.__file__).parents[1] / "scenarios" / "demo.toml"


@pytest.mark.parametrize("terminal", [False, True])
def test_each_round_has_one_line(terminal: bool) -> None:
    said = io.StringIO()
    # What a pipe is taken for is 80 wide.
    width = 200 if terminal else 80
    console = Console(file=said, width=width, force_terminal=terminal, no_color=True)
    with SimulationProgress(Scenario.load(DEMO, ()), console) as progress:
        progress.cell("elastic", 0, 24)
        for number in range(1, 7):
            progress.reply(1, 4)
            progress.round(number, number / 10, 1.0, 2.0)
    found = [line for line in said.getvalue().splitlines() if " of 24: " in line]
    assert len(found) == 6
    expected = "elastic, seed 0, round 6 of 24: accuracy 60.0%, loss 1.000, 2 s simulated, about "
    assert expected in found[-1] and found[-1].endswith(" left")
    # One round says nothing of how long the others take.
    assert found[0].endswith("s simulated")
    if not terminal:
        assert said.getvalue().splitlines() == found


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.06027, "0.0603"), (9.5, "9.5"), (12345.6, "12346")]
)
def test_short_simulated_times_are_not_rounded_to_nothing(seconds: float, shown: str) -> None:
    said = io.StringIO()
    with SimulationProgress(Scenario.load(DEMO, ()), Console(file=said, width=200)) as progress:
        progress.cell("full", 0, 24)
        progress.round(1, 0.5, 1.0, seconds)
    assert f" {shown} s simulated" in said.getvalue()


def test_the_time_left_is_that_of_all_other_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    said, clock = io.StringIO(), [100.0]
    monkeypatch.setattr(simulate.time, "monotonic", lambda: clock[0])
    scenario = Scenario.load(
        DEMO, ('methods=["full", "elastic"]', "seeds=[0, 1]", "training.rounds=4")
    )
    with SimulationProgress(scenario, Console(file=said, width=200)) as progress:
        # The first of four cells was run before.
        for cell in range(4):
            progress.cell("full", cell, 4)
            for number in range(5) if cell else ():
                progress.round(number, 0.5, 1.0, 2.0)
                clock[0] += 10.0
    left = [line.partition("about ")[2] for line in said.getvalue().splitlines()]
    # Eleven rounds are left after the first of twelve; a test of the untrained model comes before each four.
    assert left[:3] == ["", "1 min 50 s left", "1 min 40 s left"] and left[-1] == ""


def test_where_simulated_time_ends_a_run_it_says_how_much_of_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, clock = io.StringIO(), [0.0]
    monkeypatch.setattr(simulate.time, "monotonic", lambda: clock[0])
    changes = ["methods=full", "seeds=0", "training.rounds=1000", "training.simulated_seconds=100"]
    scenario = Scenario.load(DEMO, changes)
    with SimulationProgress(scenario, Console(file=said, width=200)) as progress:
        progress.cell("full", 0, 1000)
        for number in range(4):
            progress.round(number, 0.5, 1.0, 25.0 * number)
            clock[0] += 10.0
    left = [line.partition("about ")[2] for line in said.getvalue().splitlines()]
    assert left == ["", "30 s left", "20 s left", "10 s left"]
