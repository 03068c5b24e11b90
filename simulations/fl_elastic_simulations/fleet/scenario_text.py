"""The scenario for a fleet to train, as text."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

from fl_elastic.errors import FleetError
from fl_elastic_simulations.fleet.fleet_method import fleet_method
from fl_elastic_simulations.scenario import Scenario

_DIGITS = "digits.toml"


def scenario_text(
    path: Path | None, overrides: Iterable[str], nodes: int | None = None, *, method: str = ""
) -> str:
    """Return a scenario as JSON; without a file, that of handwritten digits for this number of nodes.

    Raises
    ------
    ScenarioError
        If the file is invalid, or a fleet cannot run this method of it, so that no fleet is started in vain.
    FleetError
        If the numbers of clients and of nodes differ.
    """
    with ExitStack() as stack:
        if path is None:
            packed = resources.files(__package__) / _DIGITS
            path = stack.enter_context(resources.as_file(packed))
            overrides = [f"fleet.0.count={nodes}", *overrides]
        scenario = Scenario.load(path, overrides)
    if nodes is not None and len(scenario.clients) != nodes:
        raise FleetError(
            f"the scenario has {len(scenario.clients)} clients and the fleet {nodes} nodes; "
            f"use --local {len(scenario.clients)}, or change the counts with --set fleet.0.count=..."
        )
    fleet_method(scenario, method)
    return scenario.to_json()
