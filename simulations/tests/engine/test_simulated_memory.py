"""Devices of a scenario that cannot hold a full step: they train a part of the model, or are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from choosing_costs import ran as results_of
from choosing_costs import with_costs

from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic_simulations.engine.client import LATE
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario import Scenario

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"policy": "full"},
    "fewer": {"policy": "full", "budgeted": True},
    "elastic": {"policy": "elastic"},
    "peer": {"peer": "random_layers"},
}


def scenario(memory: int | None = None) -> Scenario:
    table = {
        "seeds": [0],
        "data": {"dataset": "digits", "train_limit": 160, "test_limit": 30},
        "model": {"name": "digits_cnn"},
        "training": {"rounds": 2, "batch_size": 4, "learning_rate": 0.03, "local_steps": 2},
        "fleet": [
            {"name": "large", "device": "laptop", "slowdown": 1.0, "count": 2},
            {"name": "small", "device": "laptop", "slowdown": 1.0, "count": 2}
            | ({} if memory is None else {"memory_bytes": memory}),
        ],
        "methods": list(METHODS),
        "method": METHODS,
        "target": {"method": "plain"},
    }
    return Scenario.from_json(json.dumps(table))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return measure_profile(scenario(), None)


def head_and_all(profile: CostProfile) -> tuple[float, float]:
    everything = np.ones(len(profile), bool)
    head = np.zeros(len(profile), bool)
    head[profile.graph.head] = True
    return mask_bytes(profile, head), mask_bytes(profile, everything, lean=True)


@pytest.fixture
def ran(profile: CostProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    with_costs(monkeypatch, profile)
    return lambda made: results_of(made, tmp_path)


@pytest.mark.slow
def test_who_cannot_hold_a_full_step_trains_a_part_of_it_or_nothing(
    ran: Any, profile: CostProfile
) -> None:
    least, most = head_and_all(profile)
    cells = ran(scenario(memory=int((least + most) / 2)))
    # Two rounds, two devices.
    assert cells["plain"].rejected == 4
    assert max(cells["plain"].coverage["small"][-1]) == 0.0
    assert cells["elastic"].rejected == 0
    assert 0.0 < np.mean(cells["elastic"].coverage["small"][-1]) < 1.0
    assert min(cells["elastic"].coverage["large"][-1]) == 1.0
    assert cells["plain"].rejections == {
        "client could not train: a step takes … MB, the device has … MB": {"1": 2, "2": 2}
    }
    peaks = cells["elastic"].peaks
    assert peaks["small"] <= (least + most) / 2 < most <= peaks["large"]
    assert "small" not in cells["plain"].peaks


@pytest.mark.slow
def test_all_take_part_where_there_is_room(ran: Any, profile: CostProfile) -> None:
    # Random layers train everything where nothing limits them.
    plain, lean = (
        mask_bytes(profile, np.ones(len(profile), bool), lean=less) for less in (False, True)
    )
    cells = ran(scenario(memory=int(plain) + 1))
    assert {name: cell.rejected for name, cell in cells.items()} == dict.fromkeys(METHODS, 0)
    # Who plans by a memory budget runs layers that keep less.
    expected = [
        lean if "peer" not in each and name != "plain" else plain for name, each in METHODS.items()
    ]
    assert [cell.peaks["small"] for cell in cells.values()] == pytest.approx(expected)


def test_who_lacks_memory_is_not_late_where_no_time_is_set(
    profile: CostProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_costs(monkeypatch, profile, profile=0.5)
    least, _ = head_and_all(profile)
    table = json.loads(scenario(memory=int(least / 2)).to_json())
    # A speed-up makes the first fit estimate its costs.
    table["fleet"][1]["speedup"] = 2.0
    made = Scenario.from_json(json.dumps(table | {"methods": ["elastic"], "target": None}))
    cell = results_of(made, tmp_path)["elastic"]
    assert cell.profile_seconds > 0 and cell.rejected == 4
    assert all("memory" in each and LATE not in each for each in cell.rejections)


@pytest.mark.slow
def test_a_peer_sends_nothing_that_its_device_cannot_have_trained(
    ran: Any, profile: CostProfile
) -> None:
    least, _ = head_and_all(profile)
    cells = ran(scenario(memory=int(least / 2)))
    assert cells["peer"].rejected == 4 and max(cells["peer"].coverage["small"][-1]) == 0.0
    # Nor can any policy train what does not even fit for the head.
    assert cells["elastic"].rejected == 4 and cells["fewer"].rejected == 4
