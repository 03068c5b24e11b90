"""Progress of a simulation on the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from fl_elastic_simulations.scenario.scenario import Scenario

__all__ = ["SimulationProgress"]


class SimulationProgress:
    """Prints a line per round; on a terminal, bars below show all rounds and the clients of this one."""

    def __init__(self, scenario: Scenario, console: Console) -> None:
        self._console = console
        self._rounds = scenario.training.rounds
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        cells = len(scenario.methods) * len(scenario.seeds)
        self._all = self._bars.add_task("rounds", total=cells * self._rounds, note="starting")
        self._clients = self._bars.add_task("clients", total=len(scenario.clients), note="")
        self._started = 0
        self._name = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def cell(self, method: str, seed: int, rounds: int) -> None:
        """Show which method and seed run now."""
        self._name = f"{method}, seed {seed}"
        self._bars.update(self._all, description=self._name, completed=self._started * rounds)
        self._started += 1

    def reply(self, received: int, expected: int) -> None:
        """Show how many clients of the round have answered."""
        self._bars.update(self._clients, completed=received, total=expected)

    def round(self, number: int, accuracy: float, loss: float, simulated_seconds: float) -> None:
        """Show the global model after a round."""
        note = f"accuracy {accuracy:.1%}, loss {loss:.3f}, {simulated_seconds:.0f} s simulated"
        self._bars.update(
            self._all, completed=(self._started - 1) * self._rounds + number, note=note
        )
        self._console.print(
            f"{self._name}, round {number} of {self._rounds}: {note}", highlight=False
        )
