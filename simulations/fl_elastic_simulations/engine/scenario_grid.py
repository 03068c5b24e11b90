"""A scenario whose devices come and go, on a grid that simulates this in the run's time with claimed costs."""

from __future__ import annotations

from flwr.app import Message
from flwr.serverapp import Grid

from fl_elastic.errors import UpdateError
from fl_elastic.flower.records import answer_in
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.scenario.scenario import Scenario
from fl_elastic_simulations.unequal.costs import HostCost
from fl_elastic_simulations.unequal.grid import UnequalGrid


def on_fleet(scenario: Scenario, grid: Grid, cell: RunResult) -> Grid:
    """Return the grid for a scenario's rounds in the time of a cell; the given grid if no device ever leaves."""
    if scenario.devices.always_there:
        return grid
    return UnequalGrid(
        grid, scenario.devices, min_available_nodes=1, costs=_claimed, clock=_CellClock(cell)
    )


class _CellClock:
    """The clock of a cell: its time also includes the server's work."""

    def __init__(self, cell: RunResult) -> None:
        self._cell = cell

    @property
    def now(self) -> float:
        return self._cell.simulated_seconds

    def wait_until(self, until: float) -> None:
        self._cell.waited_until(until)


def _claimed(message: Message, reply: Message) -> HostCost:
    """Return the costs that a simulated client claims, from its profile; anything but training is free."""
    if message.metadata.message_type != "train":
        return HostCost(0.0, 0.0, 0.0, 0.0)
    downlink = float(sum(record.count_bytes() for record in message.content.array_records.values()))
    try:
        said = answer_in(reply)
    except UpdateError:
        # A client that refuses answers at once and sends nothing.
        return HostCost(0.0, downlink, 0.0, 0.0)
    return HostCost(
        float(said.metrics["predicted-seconds"]), downlink, float(len(said.packed)), 0.0
    )
