"""Progress of a simulation on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
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

_QUIET_SECONDS = 10.0


class SimulationProgress:
    """Shows all rounds, the current method, and the clients of the round.

    Without a terminal it prints a line per method, and one every ten seconds in between, instead of a moving bar.
    """

    def __init__(
        self, scenario: Scenario, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._printed_at = clock()
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
        self._last = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._finish_line()
        self._bars.stop()

    def cell(self, method: str, seed: int, rounds: int) -> None:
        """Show which method and seed run now."""
        self._finish_line()
        self._name, self._last = f"{method}, seed {seed}", ""
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
        self._last = f"{self._name}: {note} after {number} rounds"
        late = self._clock() - self._printed_at >= _QUIET_SECONDS
        if late and not self._console.is_terminal:
            self._finish_line()

    def _finish_line(self) -> None:
        if self._last:
            self._console.print(self._last, highlight=False)
            self._printed_at = self._clock()
            self._last = ""
