"""Correlated layouts: the slow devices hold what nobody else has, and every example is dealt once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.data.partition import correlated_labels, correlated_owners
from fl_elastic_simulations.scenario import Scenario

SPEEDS = [1.0, 4.0, 2.0, 3.0, 1.0, 4.0]
SLOW = (1, 3, 5)
LABELS = np.repeat(np.arange(10), 60)


def dealt(seed: int, alpha: float = 0.5) -> list[np.ndarray]:
    return correlated_labels(LABELS, SPEEDS, alpha=alpha, seed=seed, min_examples=5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_four_labels_in_ten_are_the_slow_clients_alone(seed: int, alpha: float) -> None:
    parts = dealt(seed, alpha)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    fast = {int(LABELS[i]) for c, part in enumerate(parts) if c not in SLOW for i in part}
    slow = {int(LABELS[i]) for c in SLOW for i in parts[c]}
    # A strong skew may leave a common label to the slow clients as well.
    assert 4 <= len(fast) <= 6 and fast | slow == set(range(10))
    assert min(len(part) for part in parts) >= 5


def test_the_same_seed_gives_the_same_split() -> None:
    one, other, different = dealt(3), dealt(3), dealt(4)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, different, strict=True))


def test_equal_devices_cannot_be_told_apart() -> None:
    with pytest.raises(ScenarioError, match="equally fast"):
        correlated_labels(LABELS, [2.0] * 4, alpha=0.5, seed=0, min_examples=1)


def test_two_classes_split_at_the_slower_one() -> None:
    parts = correlated_labels(LABELS, [1, 1, 2], alpha=0.5, seed=0, min_examples=1)
    fast = {int(LABELS[i]) for part in parts[:2] for i in part}
    assert len(fast) == 6 and {int(LABELS[i]) for i in parts[2]} >= set(range(10)) - fast


def test_the_owners_most_unlike_the_rest_come_to_the_slow_clients() -> None:
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(12), 20)
    # Owners 3, 7 and 9 move differently.
    shift = np.isin(owners, [3, 7, 9]) * 5.0 + owners * 0.01
    inputs = rng.normal(size=(240, 2, 6)) * 0.1 + shift[:, None, None]
    parts = correlated_owners(inputs, owners, [1, 1, 3, 2], min_examples=1)
    assert set(owners[parts[2]].tolist()) == {3, 7, 9}
    assert sorted(np.concatenate(parts).tolist()) == list(range(240))
    for part in parts:
        assert len(part) == 60 and len(set(owners[part].tolist())) == 3


def test_too_few_owners_or_examples_are_refused() -> None:
    inputs, owners = np.zeros((6, 2)), np.array([0, 0, 1, 1, 2, 2])
    with pytest.raises(ScenarioError, match="3 owners"):
        correlated_owners(inputs, owners, [1, 2, 3, 4], min_examples=1)
    with pytest.raises(ScenarioError, match="2 examples"):
        correlated_owners(inputs, owners, [1, 2, 3], min_examples=3)


def scenario(partition: str, slowdowns: tuple[float, ...]) -> Scenario:
    table = {
        "data": {"dataset": "digits", "partition": partition, "layout": "correlated"},
        "model": {"name": "digits_cnn"},
        "training": {"rounds": 1},
        "fleet": [{"device": "laptop", "slowdown": slowdown} for slowdown in slowdowns],
    }
    return Scenario.from_json(json.dumps(table))


def test_a_scenario_that_cannot_be_correlated_is_refused_before_it_runs() -> None:
    assert scenario("dirichlet", (1.0, 2.0)).data.layout == "correlated"
    with pytest.raises(ScenarioError, match="dirichlet or natural, not iid"):
        scenario("iid", (1.0, 2.0))
    with pytest.raises(ScenarioError, match="equally fast"):
        scenario("dirichlet", (2.0, 2.0))
