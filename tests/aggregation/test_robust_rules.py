"""Robust rules: a bad fifth of the clients cannot decide, and ragged updates are merged or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_elastic.aggregation import MergeOptions, PartialMean
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

PAIR = Manifest(("a", "b"), ((4,), (2, 2)), ("float64",) * 2, (Role.PARAMETER,) * 2)
BASE = {"a": np.zeros(4), "b": np.zeros((2, 2))}
ROBUST = ["krum", "median", "norm_clipping", "trimmed_mean"]


def honest(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"a": 1 + 0.1 * rng.standard_normal(4), "b": 1 + 0.1 * rng.standard_normal((2, 2))}


def fleet(poison: float, clients: int = 10, bad: int = 2) -> list[PartialUpdate]:
    rng = np.random.default_rng(0)
    updates = []
    for client in range(clients):
        deltas = honest(rng)
        if client < bad:
            deltas = {name: poison * delta for name, delta in deltas.items()}
        updates.append(PartialUpdate(deltas, dict.fromkeys(deltas, 1), 5))
    return updates


def merge(rule: str, updates: list[PartialUpdate], **options: Any) -> dict[str, np.ndarray]:
    mean = PartialMean(PAIR, rule, options=MergeOptions(**options))
    for update in updates:
        mean.add(update)
    return mean.finish(BASE)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("poison", [1e6, -1.0, -1e6, 0.0])
def test_a_bad_fifth_moves_little(rule: str, poison: float) -> None:
    result = merge(rule, fleet(poison))
    assert all((array > 0.5).all() and (array < 1.5).all() for array in result.values())


def test_the_median_is_that_of_each_element_over_its_contributors() -> None:
    deltas = [np.array([1.0, 5.0, 2.0, 0.0]), np.array([3.0, 4.0, 9.0, 7.0]), np.array([2.0] * 4)]
    updates = [PartialUpdate({"a": delta}, {"a": 1}, 1) for delta in deltas]
    updates += [PartialUpdate({"b": np.full((2, 2), v)}, {"b": 1}, 1) for v in (1.0, 7.0, 3.0)]
    result = merge("median", updates)
    assert result["a"].tolist() == [2.0, 4.0, 2.0, 2.0]
    assert result["b"].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_the_trimmed_mean_leaves_out_a_fifth_at_each_end() -> None:
    values = [100.0, 1.0, 2.0, 3.0, -50.0]
    updates = [PartialUpdate({"a": np.full(4, v)}, {"a": 1}, 1) for v in values]
    assert merge("trimmed_mean", updates)["a"].tolist() == [2.0] * 4
    # At least one: somebody of four may be bad, too.
    assert merge("trimmed_mean", updates[:4])["a"].tolist() == [2.5] * 4
    assert merge("trimmed_mean", updates[:4], bad_share=0.0)["a"].tolist() == [26.5] * 4


def test_fewer_bad_clients_may_be_assumed() -> None:
    values = [100.0, -50.0, 9.0, *[1.0] * 7]
    updates = [PartialUpdate({"a": np.full(4, v)}, {"a": 1}, 1) for v in values]
    assert merge("trimmed_mean", updates)["a"].tolist() == [1.0] * 4
    assert merge("trimmed_mean", updates, bad_share=0.1)["a"].tolist() == [2.0] * 4
    values = [3.0, 2.5, 2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 3.0]
    updates = [PartialUpdate({"a": np.full(4, v)}, {"a": 1}, 1) for v in values]
    assert merge("krum", updates, bad_share=0.1)["a"].tolist() == [1.0] * 4
    assert merge("krum", updates)["a"].tolist() == [0.5] * 4


def test_norm_clipping_shortens_to_the_median_norm() -> None:
    values = [1.0, 3.0, 1000.0]
    updates = [PartialUpdate({"a": np.full(4, v)}, {"a": 1}, 1) for v in values]
    assert merge("norm_clipping", updates)["a"] == pytest.approx(np.full(4, 7.0 / 3.0))


def test_parts_count_where_they_were_trained() -> None:
    mask = np.array([True, True, False, False])
    part = PartialUpdate({"a": 9.0 * mask}, {"a": 1}, 1, parts={"a": (mask,)})
    whole = [PartialUpdate({"a": np.full(4, v)}, {"a": 1}, 1) for v in (1.0, 2.0)]
    # Two contributors of an element are no quorum where one client may be bad.
    assert merge("median", [part, *whole])["a"].tolist() == [2.0, 2.0, 0.0, 0.0]
    everybody = {"bad_share": 0.0}
    assert merge("median", [part, *whole], **everybody)["a"].tolist() == [2.0, 2.0, 1.5, 1.5]
    assert merge("trimmed_mean", [part, *whole], **everybody)["a"].tolist() == [4.0, 4.0, 1.5, 1.5]
    assert merge("median", [part], **everybody)["a"].tolist() == [9.0, 9.0, 0.0, 0.0]


def test_krum_takes_one_honest_update_whole() -> None:
    updates = fleet(-1e6)
    result = merge("krum", updates)
    found = [u for u in updates if np.allclose(u.deltas["a"], result["a"])]
    assert len(found) == 1 and found[0] in updates[2:]
    assert np.allclose(found[0].deltas["b"], result["b"])


def test_krum_compares_what_updates_share() -> None:
    updates = fleet(1.0, clients=4, bad=0)
    ragged = [*updates, PartialUpdate({"a": np.full(4, -50.0)}, {"a": 1}, 1)]
    result = merge("krum", ragged)
    assert any(np.allclose(u.deltas["b"], result["b"]) for u in updates)


def test_robust_rules_know_steps_too() -> None:
    pairs = (8.0, 8), (2.0, 2), (5.0, 5)
    updates = [PartialUpdate({"a": np.full(4, v)}, {"a": s}, 1) for v, s in pairs]
    # Each goes 1 per step; five steps in the middle.
    assert merge("median", updates, normalise_steps=True)["a"].tolist() == [5.0] * 4
