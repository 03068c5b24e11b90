"""Hostile clients of the poisoning benchmark: what they send is what the attack says, and what is done about it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from slow_ones import slow_unless

from fl_elastic.errors import UpdateError
from fl_elastic.profiling import CostProfile
from fl_elastic.update import Manifest, PartialUpdate, decode
from fl_elastic.update.manifest import Role
from fl_elastic_simulations.benchmarks import poison
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario.scenario import Scenario

MANIFEST = Manifest(("w",), ((3,),), ("float32",), (Role.PARAMETER,))
UPDATE = PartialUpdate({"w": np.array([1.0, -2.0, 3.0], np.float32)}, {"w": 2}, 7, 9)
REJECTED = {"not a number", "stale"}


def short(rounds: int) -> Scenario:
    table: dict[str, Any] = json.loads(json.dumps(poison._SCENARIO))
    table["training"] |= {"rounds": rounds, "local_steps": 2}
    return Scenario.from_json(json.dumps(table))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return measure_profile(short(1), None)


def sent(name: str) -> PartialUpdate:
    attack = poison.ATTACKS[name]
    assert attack is not None
    return decode(attack(UPDATE, MANIFEST), MANIFEST)


def test_attacks_send_what_they_say() -> None:
    assert sent("a million times").deltas["w"].tolist() == [1e6, -2e6, 3e6]
    assert sent("sign flipped").deltas["w"].tolist() == [-1.0, 2.0, -3.0]
    assert sent("stale").base_version == 6
    with pytest.raises(UpdateError, match="NaN"):
        sent("not a number")


@pytest.mark.parametrize(
    "attack", slow_unless({"a million times", "not a number", "stale"}.__contains__, poison.ATTACKS)
)
def test_two_of_ten_clients_attack_and_the_run_goes_on(attack: str, profile: CostProfile) -> None:
    accuracy, rejected = poison._cell(short(2), profile, "median", attack, 0)
    assert 0 <= accuracy <= 1
    assert rejected == (4 if attack in REJECTED else 0)
