"""What a simulation says of its progress where nobody sees a moving bar: in a log, a pipe, a job of CI."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import fl_elastic_simulations
from fl_elastic_simulations.cli.progress import SimulationProgress
from fl_elastic_simulations.scenario import Scenario

DEMO = Path(fl_elastic_simulations.__file__).parents[1] / "scenarios" / "demo.toml"


@pytest.mark.parametrize(("a_round", "lines"), [(0.1, 1), (6.0, 3), (30.0, 6)])
def test_without_a_terminal_it_is_never_silent_for_long(a_round: float, lines: int) -> None:
    now, said = [0.0], io.StringIO()
    console = Console(file=said, width=200)
    with SimulationProgress(Scenario.load(DEMO, ()), console, lambda: now[0]) as progress:
        progress.cell("elastic", 0, 6)
        for number in range(1, 7):
            now[0] += a_round
            progress.reply(1, 4)
            progress.round(number, number / 10, 1.0, 2.0)
    found = said.getvalue().splitlines()
    assert len(found) == lines
    assert found[-1] == (
        "elastic, seed 0: accuracy 60.0%, loss 1.000, 2 s simulated after 6 rounds"
    )
