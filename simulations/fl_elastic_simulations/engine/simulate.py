"""Run a scenario on Flower's simulation engine or in this process, and write its results."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fl_elastic.errors import ScenarioError
from fl_elastic.flower.incremental_grid import IncrementalGrid, Interrupted
from fl_elastic.groups import TensorGroup
from fl_elastic.state.files import write_atomically
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid, client_processes
from fl_elastic_simulations.engine.interrupts import stopped_by_interrupt
from fl_elastic_simulations.engine.methods import check_methods
from fl_elastic_simulations.engine.progress import Progress
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation, run_methods
from fl_elastic_simulations.engine.summary import summarise
from fl_elastic_simulations.engine.supplied_grid import on_a_cluster
from fl_elastic_simulations.engine.workload import scenario_dataset
from fl_elastic_simulations.report.page import write_page
from fl_elastic_simulations.unequal.node_partitions import partitions_of

# Between two pages of a run that goes on: writing the demo's takes 0.2 s, and 0.5 s the first time.
_SHOWN_SECONDS = 60.0


def simulate(
    simulation: Simulation, progress: Progress, *, engine: str = "flower", workers: int = 1
) -> dict[str, Any]:
    """Run all methods and seeds of a scenario; return the summary.

    Parameters
    ----------
    simulation : Simulation
        What to run, and where.
    progress : Progress
        Told of the progress.
    engine : {"flower", "local"}
        ``flower`` is Flower's simulation engine, on the Ray cluster of ``RAY_ADDRESS`` if that is set. ``local``
        runs all clients one after the other in this process: it starts at once, takes the memory of one client, and
        depends on the seed only.
    workers : int
        Number of processes that train the clients of the local engine; 1 is this process. Results are the same.

    Raises
    ------
    ElasticError
        If the scenario names something unknown, its data is missing, or the folder cannot be written.
    KeyboardInterrupt
        On Ctrl-C, after the working clients have answered; finished cells and the newest page are then on disk.
    """
    if engine not in ("flower", "local"):
        raise ScenarioError(f"engine {engine!r}: known are flower, local")
    check_methods(simulation.scenario)
    # Detects a missing dataset before processes are started.
    scenario_dataset(simulation.scenario, simulation.data_root)
    _check_writable(simulation.directory)

    shown = time.monotonic()

    def show(
        cells: Sequence[RunResult], groups: Sequence[TensorGroup], running: RunResult | None
    ) -> None:
        """Write the results so far, for readers during the run and after an interruption."""
        nonlocal shown
        if running is None or time.monotonic() - shown >= _SHOWN_SECONDS:
            found = summarise(simulation.scenario, cells, groups, running)
            write_results(found, simulation.directory)
            shown = time.monotonic()

    if engine == "local":
        clients = len(simulation.scenario.clients)
        with client_processes(simulated_client_app, min(workers, clients)) as processes:
            grid = InProcessGrid(
                clients, simulated_client_app(), progress.reply, processes=processes
            )
            return summarise(simulation.scenario, *run_methods(simulation, grid, progress, show))
    if workers != 1:
        raise ScenarioError(
            f"{workers} workers: Flower's engine takes all cores by itself; name a number with engine 'local'"
        )
    found: list[dict[str, Any]] = []
    server_app = ServerApp()

    with stopped_by_interrupt() as stop:

        @server_app.main()
        def main(grid: Grid, context: Context) -> None:
            del context
            watched = ReportingGrid(grid, progress.reply, stop)
            cells, groups = run_methods(simulation, watched, progress, show)
            found.append(summarise(simulation.scenario, cells, groups))

        try:
            _run(server_app, len(simulation.scenario.clients))
        except Interrupted:
            raise KeyboardInterrupt from None
    return found[0]


def _check_writable(directory: Path) -> None:
    """Check before hours of work that the results can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(f"cannot make output folder {directory}: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ScenarioError(f"cannot write into output folder {directory}: choose another")


def _run(server_app: ServerApp, clients: int) -> None:
    # Imported here: it takes half a second, which the local engine does not need.
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    arguments: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
    }
    # A cluster has the processors of its machines, and refuses another number.
    if not on_a_cluster():
        arguments["num_cpus"] = min(os.cpu_count() or 1, clients)
    run_simulation(
        server_app,
        simulated_client_app(),
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": arguments,
        },
    )


def write_results(summary: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Write ``summary.json`` and ``report.html`` into ``directory``; return both paths."""
    text = json.dumps(summary, indent=1, allow_nan=False)
    return (
        write_atomically(directory / "summary.json", text.encode()),
        write_page(summary, directory / "report.html"),
    )


class ReportingGrid(IncrementalGrid):
    """Wraps a grid; reports each reply as it arrives, and returns all of them together.

    The order of the replies then does not depend on which client was faster. Nodes are ordered by their partitions,
    since Flower draws their numbers at random.

    Parameters
    ----------
    grid : Grid
        The wrapped grid.
    on_reply : callable
        Called with the numbers of replies received and expected.
    stop : threading.Event, optional
        When it is set, waiting for replies ends with `Interrupted`.
    """

    def __init__(
        self,
        grid: Grid,
        on_reply: Callable[[int, int], None],
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__(grid, on_reply=on_reply, stop=stop)
        self._partitions: dict[int, int] = {}

    def get_node_ids(self) -> list[int]:
        """Return the nodes ordered by partition; new nodes are asked for theirs."""
        nodes = list(self.inner.get_node_ids())
        self._partitions |= partitions_of(
            self.inner, [node for node in nodes if node not in self._partitions]
        )
        return sorted(nodes, key=self._partitions.__getitem__)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push the messages, and pull replies until all have arrived or time is up."""
        return list(super().send_and_receive(messages, timeout=timeout))
