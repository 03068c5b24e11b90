"""Bad clients of the benchmark: what they send is what the lie says, and the run goes on."""

from __future__ import annotations

import numpy as np
import pytest
from slow_ones import slow_unless

from fl_elastic.update import Manifest, PartialUpdate, decode
from fl_elastic.update.manifest import Role
from fl_elastic_simulations.benchmarks.bad_clients import BENCHMARK, LIES, trained

MANIFEST = Manifest(
    ("w", "v"), ((3,), (2,)), ("float32", "float32"), (Role.PARAMETER, Role.PARAMETER)
)
UPDATE = PartialUpdate(
    {"w": np.array([1.0, -2.0, 3.0], np.float32), "v": np.ones(2, np.float32)},
    {"w": 2, "v": 2}, 7, 9,
)  # fmt: skip


def sent(name: str) -> PartialUpdate:
    attack = LIES[name].attack
    assert attack is not None
    return decode(attack(UPDATE, MANIFEST), MANIFEST)


def test_liars_send_what_they_say() -> None:
    opposite = sent("opposite, a hundred million examples")
    assert opposite.deltas["w"].tolist() == [-1.0, 2.0, -3.0]
    assert opposite.num_examples == 100_000_000
    assert sent("steps normalised, a million claimed").steps == {"w": 1_000_000, "v": 1_000_000}
    alone = sent("first tensor of the liars alone, a thousandfold").deltas
    assert alone["w"].tolist() == [1000.0, -2000.0, 3000.0] and alone["v"].tolist() == [1.0, 1.0]
    assert set(sent("a tensor left out").deltas) == {"w"}


@pytest.mark.parametrize("lie", slow_unless("running variance -5".__eq__, LIES))
def test_two_of_ten_clients_lie_and_the_run_goes_on(lie: str) -> None:
    run = trained("median", LIES[lie], LIES[lie].liars[-1], rounds=1)
    assert len(run.history) == 2 and 0 <= run.history[-1]["accuracy"] <= 1


def test_the_table_has_a_row_for_each_lie() -> None:
    lies = BENCHMARK.tables({"krum | none | 0": {"accuracy": 0.25}})["lies"]
    assert set(lies.index) == set(LIES)
    assert lies.loc["none", "krum"] == "25.0" and lies.loc["none", "median"] == ""
