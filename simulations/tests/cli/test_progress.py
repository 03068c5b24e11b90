"""What a simulation says of its progress: a line per round, with moving bars below it or without."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import fl_elastic_simulations
from fl_elastic_simulations.cli.simulate import SimulationProgress
from fl_elastic_simulations.scenario import Scenario

DEMO = Path(fl_elastic_simulations.__file__).parents[1] / "scenarios" / "demo.toml"


@pytest.mark.parametrize("terminal", [False, True])
def test_each_round_has_one_line(terminal: bool) -> None:
    said = io.StringIO()
    console = Console(file=said, width=200, force_terminal=terminal, no_color=True)
    with SimulationProgress(Scenario.load(DEMO, ()), console) as progress:
        progress.cell("elastic", 0, 24)
        for number in range(1, 7):
            progress.reply(1, 4)
            progress.round(number, number / 10, 1.0, 2.0)
    found = [line for line in said.getvalue().splitlines() if " of 24: " in line]
    assert len(found) == 6
    expected = "elastic, seed 0, round 6 of 24: accuracy 60.0%, loss 1.000, 2 s simulated"
    assert found[-1].endswith(expected)
    if not terminal:
        assert said.getvalue().splitlines() == found
