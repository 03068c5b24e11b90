"""Adapters merged by their products: the nearest to the mean product that the rank allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_elastic.aggregation import MergeOptions, PartialMean
from fl_elastic.aggregation.products import factor_pairs, nearest_factors
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.manifest import Role

_Array = NDArray[np.float64]
OUT, IN, RANK = 7, 5, 2
B, A, BIAS = "h.0.lora_B.weight", "h.0.lora_A.weight", "h.0.bias"
MANIFEST = Manifest(
    (A, B, BIAS), ((RANK, IN), (OUT, RANK), (OUT,)), ("float64",) * 3, (Role.PARAMETER,) * 3
)


def start(seed: int = 0) -> dict[str, _Array]:
    generator = np.random.default_rng(seed)
    return {
        A: generator.standard_normal((RANK, IN)), B: generator.standard_normal((OUT, RANK)),
        BIAS: np.zeros(OUT),
    }  # fmt: skip


def update(
    seed: int, *names: str, examples: int = 1, size: float = 0.3, **more: Any
) -> PartialUpdate:
    generator = np.random.default_rng(seed)
    deltas = {name: size * generator.standard_normal(start()[name].shape) for name in names}
    return PartialUpdate(deltas, dict.fromkeys(deltas, 1), num_examples=examples, **more)


def merged(
    rule: str, base: dict[str, _Array], *updates: PartialUpdate, **options: Any
) -> dict[str, _Array]:
    mean = PartialMean(MANIFEST, rule, **options)
    for each in updates:
        mean.add(each)
    return mean.finish(base)


def product(weights: dict[str, _Array]) -> _Array:
    return np.asarray(weights[B] @ weights[A])


def nearest(whole: _Array) -> _Array:
    u, singular, v = np.linalg.svd(whole)
    return np.asarray(u[:, :RANK] * singular[:RANK] @ v[:RANK])


def test_the_product_is_the_nearest_to_the_weighted_mean_of_products() -> None:
    base, updates = start(), [update(n, A, B, examples=n) for n in (1, 2, 5)]
    held = [{name: base[name] + each.deltas[name] for name in (A, B)} for each in updates]
    exact = np.asarray(sum(n * product(each) for n, each in zip((1, 2, 5), held, strict=True))) / 8
    found = merged("products", base, *updates)
    np.testing.assert_allclose(product(found), nearest(exact), rtol=1e-9, atol=1e-12)
    plain = merged("contributors", base, *updates)
    assert np.linalg.norm(product(found) - exact) < np.linalg.norm(product(plain) - exact)


def test_steps_are_normalised_in_factors_as_in_other_tensors() -> None:
    """FedNova: changes per step, times the mean number of steps."""
    base, examples, steps = start(), (1, 2, 5), (4, 12, 6)
    updates = [
        replace(each, steps=dict.fromkeys(each.deltas, taken))
        for each, taken in zip((update(n, A, B, BIAS, examples=n) for n in examples), steps, strict=True)
    ]  # fmt: skip
    usual = sum(n * taken for n, taken in zip(examples, steps, strict=True)) / 8
    scaled = [
        replace(each, deltas={name: usual / taken * each.deltas[name] for name in each.deltas})
        for each, taken in zip(updates, steps, strict=True)
    ]
    found = merged("products", base, *updates, options=MergeOptions(normalise_steps=True))
    expected = merged("products", base, *scaled)
    for name in (A, B, BIAS):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)
    assert not np.allclose(found[B], merged("products", base, *updates)[B])


def test_what_one_rank_holds_is_exact() -> None:
    """As with one client, or where all share the rows of A."""
    base, (one, other) = start(), (update(1, B), update(2, B))
    found = merged("products", base, one, other)
    exact = (base[B] + (one.deltas[B] + other.deltas[B]) / 2) @ base[A]
    np.testing.assert_allclose(product(found), exact, rtol=1e-9, atol=1e-12)


def test_who_trained_neither_factor_does_not_count() -> None:
    base, (one, other) = start(), (update(1, A, B, BIAS), update(2, BIAS, examples=9))
    found = merged("products", base, one, other)
    np.testing.assert_allclose(
        product(found), (base[B] + one.deltas[B]) @ (base[A] + one.deltas[A]), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(found[BIAS], (one.deltas[BIAS] + 9 * other.deltas[BIAS]) / 10)


def test_adapters_that_nobody_trained_stay() -> None:
    base = start()
    found = merged("products", base, update(1, BIAS))
    assert np.array_equal(found[A], base[A]) and np.array_equal(found[B], base[B])


def test_rows_that_a_client_does_not_train_stay_as_they_were_sent() -> None:
    """Unequal ranks: the first row of A and column of B alone."""
    base, first = start(), np.array([True, False])
    trained = update(1, A, B)
    deltas = {A: trained.deltas[A] * first[:, None], B: trained.deltas[B] * first}
    part = PartialUpdate(
        deltas, {A: 1, B: 1}, num_examples=1, parts={A: (first, None), B: (None, first)}
    )
    found = merged("products", base, part)
    exact = (base[B] + deltas[B]) @ (base[A] + deltas[A])
    np.testing.assert_allclose(product(found), exact, rtol=1e-9, atol=1e-12)


def test_rows_of_a_stay_as_long_as_they_were_and_the_most_important_comes_first() -> None:
    base, updates = start(), [update(n, A, B) for n in range(3)]
    found = merged("products", base, *updates)
    square = np.mean([np.sum((base[A] + each.deltas[A]) ** 2) for each in updates]) / RANK
    np.testing.assert_allclose(found[A] @ found[A].T, square * np.eye(RANK), atol=1e-9)
    columns = np.linalg.norm(found[B], axis=0)
    assert columns[0] > columns[1] > 0


def test_adapters_that_are_still_zero_get_rows_to_train_on() -> None:
    base = start() | {B: np.zeros((OUT, RANK))}
    found = merged("products", base, update(1, A))
    assert not found[B].any() and np.linalg.matrix_rank(found[A]) == RANK


@pytest.mark.parametrize("clients", [1, 2, 4, 9])
@pytest.mark.parametrize(("out", "inner"), [(3, 8), (8, 3), (6, 6)])
def test_stacks_of_any_shape_are_decomposed(clients: int, out: int, inner: int) -> None:
    generator = np.random.default_rng(clients)
    b, a = generator.standard_normal((out, clients)), generator.standard_normal((clients, inner))
    new_b, new_a = nearest_factors(b, a, 2, 1.0)
    u, singular, v = np.linalg.svd(b @ a)
    np.testing.assert_allclose(new_b @ new_a, u[:, :2] * singular[:2] @ v[:2], atol=1e-9)


def test_factors_are_paired_by_pefts_names() -> None:
    names = ["x.lora_A.default.weight", "x.lora_B.default.weight", "e.lora_embedding_A.default",
             "e.lora_embedding_B.default", "y.lora_A.weight", "lora_bias"]  # fmt: skip
    assert factor_pairs(names) == [(names[1], names[0]), (names[3], names[2])]
