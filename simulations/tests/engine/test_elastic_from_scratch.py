"""Growing and freezing in a simulated federation: what goes up and down from round to round."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process_grid import InProcessGrid

from fl_elastic.errors import ScenarioError
from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.engine import settling
from fl_elastic_simulations.engine.cell import Cell
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.methods import method_strategy
from fl_elastic_simulations.engine.server import LoggedProgress, Simulation, run_cell
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.peers import progfed
from fl_elastic_simulations.scenario import Scenario

# A message's header, and what little else it holds.
SPARE = 2000


def scenario(rounds: int, method: dict[str, Any]) -> Scenario:
    table = {
        "title": "small",
        "data": {"dataset": "digits", "train_limit": 240, "test_limit": 100, "min_examples": 20},
        "model": {"name": "digits_cnn"},
        "training": {"rounds": rounds, "batch_size": 16, "learning_rate": 0.03, "momentum": 0.9},
        "fleet": [{"device": "laptop", "count": 3}],
        "methods": ["only"],
        "method": {"only": method},
        "target": {"method": "only"},
    }
    return Scenario.from_json(json.dumps(table))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    torch.set_num_threads(1)
    return measure_profile(scenario(1, {"policy": "full"}), None)


def simulated(directory: Path, made: Scenario, profile: CostProfile) -> Cell:
    grid = InProcessGrid(len(made.clients), lambda node: simulated_client_app())
    return run_cell(
        Simulation(made, directory), grid, LoggedProgress(), made.methods[0], 0, profile
    )


def per_round(cell: Cell, name: str) -> list[float]:
    sums = [row[name] for row in cell.history]
    return [after - before for before, after in pairwise(sums)]


def test_a_growing_model_sends_its_stage_alone_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: CostProfile
) -> None:
    monkeypatch.setattr(progfed, "_ROUNDS_PER_STAGE", 2)
    cell = simulated(tmp_path, scenario(4, {"peer": "progfed"}), profile)
    sizes = {name: int(np.prod(shape)) for g in profile.graph.groups
             for name, shape in zip(g.parameters, g.shapes, strict=True)}  # fmt: skip
    first = sum(n for name, n in sizes.items() if name.split(".")[0] in ("conv1", "norm1"))
    second = sum(n for name, n in sizes.items() if name.split(".")[0] in ("conv2", "norm2"))
    exits = {0: 24 * 10 + 10, 1: 40 * 10 + 10}
    stages = [first + exits[0], first + exits[0], second + exits[1], first + second + exits[1]]
    for found, stage in zip(per_round(cell, "uplink_bytes"), stages, strict=True):
        # Three clients, four bytes each, and a header.
        assert 0 <= found - 3 * 4 * stage < 3 * SPARE
    down = per_round(cell, "downlink_bytes")
    whole = 3 * 4 * sum(sizes.values())
    assert down[0] > whole
    # What changed in the round before.
    for found, stage in zip(down[1:], stages, strict=False):
        assert 0 <= found - 3 * 4 * stage < 3 * SPARE


def test_the_cut_moves_up_to_the_head_once_all_below_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: CostProfile
) -> None:
    monkeypatch.setattr(settling.Movement, "by_chance", 1.0)
    freezing = {"policy": "full", "budgeted": False, "cut": "settling"}
    cell = simulated(tmp_path, scenario(3, freezing), profile)
    assert [group for _, group in cell.cuts] == ["head"]
    up, down = per_round(cell, "uplink_bytes"), per_round(cell, "downlink_bytes")
    head = 4 * (192 * 10 + 10)
    assert all(0 < each < 3 * (head + SPARE) < up[0] / 3 for each in up[1:])
    # Everything was trained in the first round, so that it goes out once more.
    assert 3 * head <= down[2] < 3 * (head + SPARE) < down[1] / 3
    assert cell.features_found > 0


def test_a_cut_that_settles_is_not_for_a_fleet() -> None:
    made = scenario(1, {"policy": "full", "cut": "settling"})
    with pytest.raises(ScenarioError, match="is for simulations"):
        method_strategy(made, made.methods[0], lambda _: None)
