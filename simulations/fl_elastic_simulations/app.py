"""The Flower app that ``flwr run simulations`` starts: a scenario, all its methods and seeds.

Settings (``flwr run simulations --run-config 'scenario="fashion_mnist"'``):

- ``scenario``: a file of ``simulations/scenarios`` by name, or a path.
- ``set``: changes, separated by semicolons, such as ``training.rounds=5; methods=full,elastic``.
- ``data-root``: folder of datasets; digits need none.
- ``output``: an absolute folder for ``summary.json`` and ``report.html``; empty writes none.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.methods import check_methods
from fl_elastic_simulations.engine.progress import LoggedProgress
from fl_elastic_simulations.engine.server import Simulation, run_methods
from fl_elastic_simulations.engine.simulate import ReportingGrid, write_results
from fl_elastic_simulations.engine.summary import summarise
from fl_elastic_simulations.scenario import Scenario

_LOG = logging.getLogger("flwr")
_SCENARIOS = Path(__file__).parent.parent / "scenarios"

client_app = simulated_client_app()
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the scenario that is named in the run config."""
    config = {key: str(value) for key, value in context.run_config.items()}
    name = config.get("scenario", "demo")
    path = _SCENARIOS / f"{name}.toml"
    changes = [change.strip() for change in config.get("set", "").split(";") if change.strip()]
    scenario = Scenario.load(path if path.exists() else Path(name), changes)
    check_methods(scenario)
    output = config.get("output", "")
    with tempfile.TemporaryDirectory(prefix="fl-elastic-") as scratch:
        directory = Path(output) if output else Path(scratch)
        simulation = Simulation(scenario, directory, config.get("data-root") or None)
        watched = ReportingGrid(grid, lambda received, expected: None)
        cells, groups = run_methods(simulation, watched, LoggedProgress())
        summary = summarise(scenario, cells, groups)
        if output:
            write_results(summary, directory)
    for method, result in summary["methods"].items():
        kept = ("final_accuracy", "simulated_seconds", "seconds_to_target", "uplink_bytes")
        _LOG.info("%s: %s", method, json.dumps({key: result[key] for key in kept}))
