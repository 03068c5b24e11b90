"""Bad clients of the benchmark: what they send is what the attack says, and what is done about it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from slow_ones import slow_unless

from fl_elastic.errors import UpdateError
from fl_elastic.update import Manifest, PartialUpdate, decode
from fl_elastic.update.manifest import Role
from fl_elastic_simulations.benchmarks.bad_clients import (
    ATTACKS,
    BENCHMARK,
    LIES,
    scenario_of,
    trained,
)

MANIFEST = Manifest(("w",), ((3,),), ("float32",), (Role.PARAMETER,))
UPDATE = PartialUpdate({"w": np.array([1.0, -2.0, 3.0], np.float32)}, {"w": 2}, 7, 9)
REJECTED = {"not a number", "stale"}


def sent(name: str) -> PartialUpdate:
    attack = ATTACKS[name]
    assert attack is not None
    return decode(attack(UPDATE, MANIFEST), MANIFEST)


def test_attacks_send_what_they_say() -> None:
    assert sent("a million times").deltas["w"].tolist() == [1e6, -2e6, 3e6]
    assert sent("sign flipped").deltas["w"].tolist() == [-1.0, 2.0, -3.0]
    assert sent("stale").base_version == 6
    with pytest.raises(UpdateError, match="NaN"):
        sent("not a number")


@pytest.mark.parametrize("attack", slow_unless("stale".__eq__, ATTACKS))
def test_two_of_ten_clients_attack_and_the_run_goes_on(attack: str) -> None:
    made = scenario_of("median")
    made = replace(made, training=replace(made.training, rounds=2, local_steps=2))
    run = trained(made, "median", 0, ATTACKS[attack], (0, 5))
    assert 0 <= run.history[-1]["accuracy"] <= 1
    assert run.rejected == (4 if attack in REJECTED else 0)


def test_tables_have_a_row_for_each_rule_and_each_lie() -> None:
    rows = {"median | stale": {"accuracy": 0.5}, "krum | none | 0": {"accuracy": 0.25}}
    tables = BENCHMARK.tables(rows)
    assert tables["attacks"].loc["median", "stale"] == "50.0"
    lies = tables["lies"]
    assert set(lies.index) == set(LIES)
    assert lies.loc["none", "krum"] == "25.0" and lies.loc["none", "median"] == ""
