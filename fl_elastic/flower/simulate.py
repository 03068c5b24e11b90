"""Run a scenario on Flower's simulation engine and write its results."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fl_elastic.flower.reporting_grid import ReportingGrid
from fl_elastic.flower.simulated_client import simulated_client_app
from fl_elastic.flower.simulated_server import Progress, Simulation, check_methods, run_cells
from fl_elastic.report import write_page
from fl_elastic.simulation.summary import summarise
from fl_elastic.simulation.workload import scenario_dataset
from fl_elastic.storage import write_atomically

__all__ = ["simulate", "write_results"]


def simulate(simulation: Simulation, progress: Progress) -> dict[str, Any]:
    """Run all methods and seeds of a scenario; return the summary.

    Raises
    ------
    ElasticError
        If the scenario names something unknown or its data is missing.
    """
    check_methods(simulation.scenario)
    # A missing dataset is found before processes are started.
    scenario_dataset(simulation.scenario, simulation.data_root)
    found: list[dict[str, Any]] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        cells, groups = run_cells(simulation, ReportingGrid(grid, progress.reply), progress)
        found.append(summarise(simulation.scenario, cells, groups))

    processors = os.cpu_count() or 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server_app,
        simulated_client_app(),
        num_supernodes=len(simulation.scenario.clients),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {
                "num_cpus": min(processors, len(simulation.scenario.clients)),
                "log_to_driver": False,
                "logging_level": logging.ERROR,
                "include_dashboard": False,
            },
        },
    )
    return found[0]


def write_results(summary: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write ``summary.json`` and ``report.html`` into ``directory``; return both paths."""
    text = json.dumps(summary, indent=1, allow_nan=False)
    return (
        write_atomically(directory / "summary.json", text.encode()),
        write_page(summary, directory / "report.html"),
    )
