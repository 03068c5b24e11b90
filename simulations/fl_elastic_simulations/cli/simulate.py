"""``fl-elastic simulate``: run a scenario and show what it found."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.cli.progress import SimulationProgress

__all__ = ["simulate"]

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
        str, typer.Option(help="flower: Flower's simulation engine; local: one process, one core.")
    ] = "flower",
    table: Annotated[
        Path | None, typer.Option(help="File for the summary without curves, small enough to keep.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Simulate a federation of unequal devices and compare methods."""
    # A wrong path is said before torch is imported, which takes seconds.
    if not scenario.exists():
        raise ScenarioError(f"no scenario file {scenario}: check the path")
    if engine not in _ENGINES:
        raise ScenarioError(f"engine {engine!r}: known are {', '.join(_ENGINES)}")
    from fl_elastic_simulations.scenario import Scenario

    loaded = Scenario.load(scenario, override or ())
    from fl_elastic.storage import write_atomically
    from fl_elastic_simulations.benchmarks.quiet import quiet_log
    from fl_elastic_simulations.engine.server import Simulation
    from fl_elastic_simulations.engine.simulate import simulate as run
    from fl_elastic_simulations.engine.simulate import write_results
    from fl_elastic_simulations.engine.summary import without_curves
    from fl_elastic_simulations.report import results_table

    output = output.resolve()
    simulation = Simulation(loaded, output, data_root, resume)
    console = Console(stderr=True)
    # Flower says dozens of lines a round; what it says of errors stays.
    with quiet_log(of=["flwr"]), SimulationProgress(loaded, console) as progress:
        summary = run(simulation, progress, engine=engine)
    summary["command"] = shlex.join(["fl-elastic", *sys.argv[1:]])
    summary_path, page = write_results(summary, output)
    if table is not None:
        write_atomically(table, (json.dumps(without_curves(summary), indent=1) + "\n").encode())
    if as_json:
        typer.echo(json.dumps(summary))
        return
    Console().print(results_table(summary))
    typer.echo(f"summary  {summary_path}\nreport   {page}")
