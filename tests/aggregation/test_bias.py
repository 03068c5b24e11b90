"""Unequal devices with unequal data: how far each rule's fixed point is from the true optimum.

The toy has one weight, in eight worlds at once that know nothing of each other. Fast clients pull it to +1 and
train it in every round; as many slow ones pull it to -1 and train it with a known probability. The true optimum,
where all pulls cancel, is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_elastic.aggregation import PartialMean
from fl_elastic.flower.client_registry import ClientRegistry
from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

WORLDS = [f"w{number}" for number in range(8)]
MANIFEST = Manifest((*WORLDS, "head"), ((1,),) * 9, ("float32",) * 9, (Role.PARAMETER,) * 9)
PULL = 0.1
"""Share of the way to its own optimum that a client goes in a round."""
RESTING = 50
"""Rounds after which where it began no longer matters."""

Probabilities = Callable[[int, PartialUpdate], dict[str, float] | None]


def update_of(weights: dict[str, np.ndarray], optimum: float, trained: set[str]) -> PartialUpdate:
    deltas = {name: PULL * (optimum - weights[name].astype(np.float64)) for name in sorted(trained)}
    deltas["head"] = np.zeros(1)
    return PartialUpdate(deltas, dict.fromkeys(deltas, 1), num_examples=10)


def resting_place(
    rule: str,
    probability: float,
    *,
    probabilities: Probabilities,
    each: int = 5,
    rounds: int = 1500,
    seed: int = 0,
) -> float:
    """The weight, averaged over so many rounds of all worlds after those in which it comes to rest."""
    generator = np.random.default_rng(seed)
    weights = {name: np.zeros(1, np.float32) for name in MANIFEST.names}
    seen = []
    for _ in range(rounds // len(WORLDS) + RESTING):
        mean = PartialMean(MANIFEST, rule)
        for client in range(2 * each):
            fast = client < each
            trained = {name for name in WORLDS if fast or generator.random() < probability}
            update = update_of(weights, 1.0 if fast else -1.0, trained)
            mean.add(update, probabilities=probabilities(client, update))
        weights = mean.finish(weights)
        seen.append([float(weights[name][0]) for name in WORLDS])
    return float(np.mean(seen[RESTING:]))


def known(probability: float, each: int = 5) -> Probabilities:
    return lambda client, _: dict.fromkeys(WORLDS, 1.0 if client < each else probability)


def of_a_ledger() -> Probabilities:
    fleet = ClientRegistry(RoundConfig())
    fleet.serve(MANIFEST)
    return fleet.trained


def test_contributors_and_all_lean_to_the_fast_clients() -> None:
    """With probability 1/4 the pulls cancel at (1 - 1/4) / (1 + 1/4) = 0.6 under the rule for all."""
    leaning = {
        rule: resting_place(rule, 0.25, probabilities=known(0.25))
        for rule in ("contributors", "all")
    }
    assert leaning["all"] == pytest.approx(0.6, abs=0.03)
    assert leaning["contributors"] == pytest.approx(0.64, abs=0.04)


def test_probabilities_of_the_ledger_remove_most_of_it_too() -> None:
    """They are estimates of late; of the round that they weigh they know nothing."""
    found = resting_place("inverse_probability", 0.25, probabilities=of_a_ledger())
    assert abs(found) < 0.12


@settings(max_examples=3)
@given(probability=st.floats(0.25, 0.6), each=st.integers(3, 6), seed=st.integers(0, 1000))
@pytest.mark.slow
def test_inverse_probability_has_less_than_half_of_the_bias(
    probability: float, each: int, seed: int
) -> None:
    bias = {
        rule: resting_place(
            rule,
            probability,
            probabilities=known(probability, each),
            each=each,
            rounds=500,
            seed=seed,
        )
        for rule in ("contributors", "all", "inverse_probability")
    }
    least = min(bias["contributors"], bias["all"])
    assert least > 0.1
    assert abs(bias["inverse_probability"]) < 0.5 * least
