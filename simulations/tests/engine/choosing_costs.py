"""Simulations whose costs are told and not measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.engine import server as simulated_server
from fl_elastic_simulations.engine.choosing import ChoosingCosts
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.head_costs import HeadCosts
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.progress import LoggedProgress
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation, run_methods
from fl_elastic_simulations.scenario import Scenario


def flat_choosing(
    made: Scenario, profile: float = 0.0, plan: float = 0.0, head: HeadCosts | None = None
) -> ChoosingCosts:
    """The same seconds for every method and class of devices, none by default."""
    devices = {client.device.name: plan for client in made.clients}
    plans = {method.name: devices for method in made.methods}
    return ChoosingCosts(profile, plans, head_seconds=head or HeadCosts())


def steady(measured: CostProfile) -> CostProfile:
    """Return a profile whose seconds are the same on every machine, whatever else it does.

    The forward pass takes 2 ms, each node of the backward pass 1 ms on the way and 1 ms for its gradient.
    """
    owner = np.array([node.group is not None for node in measured.graph.nodes])
    ends = np.array([not node.inputs for node in measured.graph.nodes])
    return replace(
        measured,
        node_update_seconds=np.where(owner, 1e-3, 0.0),
        node_path_seconds=np.where(ends, 0.0, 1e-3),
        optimizer_seconds=np.zeros(len(measured)),
        forward_seconds=np.full(len(measured), 2e-3),
        fixed_seconds=0.0,
    )


def with_costs(patch: pytest.MonkeyPatch, costs: CostProfile, **choosing: Any) -> None:
    """Costs are measured, so two runs are alike only if they start from the same ones."""
    patch.setattr(simulated_server, "measure_profile", lambda *_, **__: costs)
    patch.setattr(
        simulated_server, "measure_choosing", lambda made, *_: flat_choosing(made, **choosing)
    )


def ran(made: Scenario, folder: Path) -> dict[str, RunResult]:
    """The results of a scenario by method."""
    grid = InProcessGrid(len(made.clients), simulated_client_app())
    cells, _ = run_methods(Simulation(made, folder), grid, LoggedProgress())
    return {cell.method: cell for cell in cells}
