"""``fl-elastic simulate``: run a scenario and show its results."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from fl_elastic_simulations.scenario.scenario import Scenario
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.engine.progress import Progress
from fl_elastic_simulations.report.formats import seconds_text


class SimulationProgress(Progress):
    """Prints a line per round; on a terminal, bars below show all rounds and the clients of the present one."""

    def __init__(self, scenario: Scenario, console: Console) -> None:
        self._console = console
        self._rounds = scenario.training.rounds
        self._limit = scenario.training.simulated_seconds or math.inf
        self._bars = rich_progress.Progress(
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
        self._total = len(scenario.methods) * len(scenario.seeds) * self._rounds
        self._all = self._bars.add_task("rounds", total=self._total, note="starting")
        self._clients = self._bars.add_task("clients", total=len(scenario.clients), note="")
        self._started = 0
        self._name = ""
        # Number of finished rounds, and the time, at the first report of this run.
        self._first: tuple[float, float] | None = None

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
        """Show the method and seed that run now."""
        self._name = f"{method}, seed {seed}"
        self._bars.update(self._all, description=self._name, completed=self._started * rounds)
        self._started += 1

    def reply(self, received: int, expected: int) -> None:
        """Show how many clients of the round have answered."""
        self._bars.update(self._clients, completed=received, total=expected)

    def round(self, number: int, accuracy: float, loss: float, simulated_seconds: float) -> None:
        """Show the global model after a round, and about how long the remaining rounds take at this pace."""
        digits = ".0f" if simulated_seconds >= 10 else ".3g"
        note = f"accuracy {accuracy:.1%}, loss {loss:.3f}, {simulated_seconds:{digits}} s simulated"
        # A run ends by rounds or by simulated time, whichever comes first.
        share = max(number / self._rounds, min(simulated_seconds / self._limit, 1.0))
        done = (self._started - 1 + share) * self._rounds
        self._bars.update(self._all, completed=done, note=note)
        left = self._seconds_left(done)
        if left is not None:
            # A guess has no tenths of a second.
            note += f", about {f'{left} s' if left < 60 else seconds_text(left)} left"
        self._console.print(
            f"{self._name}, round {number} of {self._rounds}: {note}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    def _seconds_left(self, done: float) -> int | None:
        now = time.monotonic()
        before, began = self._first = self._first or (done, now)
        if done <= before or done >= self._total:
            return None
        return round((now - began) / (done - before) * (self._total - done))


_ENGINES = ("flower", "local")


def simulate(
    scenario: Annotated[Path, typer.Argument(help="Scenario file (TOML).")],
    output: Annotated[Path, typer.Option(help="Folder for summary.json and report.html.")] = Path(
        "out"
    ),
    override: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a value: training.rounds=5 (repeatable)."),
    ] = None,
    data_root: Annotated[
        str | None, typer.Option(help="Folder of datasets; FL_ELASTIC_DATA_ROOT does the same.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Take finished methods and seeds of an earlier run as they are."
        ),
    ] = False,
    engine: Annotated[
        str, typer.Option(help="flower: Flower's simulation engine; local: starts at once.")
    ] = "flower",
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that train clients, with --engine local.")
    ] = 1,
    table: Annotated[
        Path | None, typer.Option(help="File for the summary without curves, small enough to keep.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Simulate a federation of unequal devices and compare methods."""
    # Report a wrong path before importing torch, which takes seconds.
    if not scenario.exists():
        raise ScenarioError(f"no scenario file {scenario}: check the path")
    if engine not in _ENGINES:
        raise ScenarioError(f"engine {engine!r}: known are {', '.join(_ENGINES)}")
    from fl_elastic_simulations.scenario import Scenario

    loaded = Scenario.load(scenario, override or ())
    from fl_elastic.cli.tables import print_table
    from fl_elastic.state.files import write_atomically
    from fl_elastic_simulations.engine.quiet import quiet_log
    from fl_elastic_simulations.engine.server import Simulation
    from fl_elastic_simulations.engine.simulate import simulate as run
    from fl_elastic_simulations.engine.simulate import write_results
    from fl_elastic_simulations.engine.summary import without_curves
    from fl_elastic_simulations.report.tables import results_table

    output = output.resolve()
    simulation = Simulation(loaded, output, data_root, resume)
    console = Console(stderr=True)
    # Flower logs dozens of lines per round; only its errors are shown.
    with quiet_log(of=["flwr"]), SimulationProgress(loaded, console) as progress:
        summary = run(simulation, progress, engine=engine, workers=workers)
    summary["command"] = shlex.join(["fl-elastic", *sys.argv[1:]])
    summary_path, page = write_results(summary, output)
    if table is not None:
        write_atomically(table, (json.dumps(without_curves(summary), indent=1) + "\n").encode())
    if as_json:
        typer.echo(json.dumps(summary))
        return
    print_table(results_table(summary))
    typer.echo(f"summary  {summary_path}\nreport   {page}")
