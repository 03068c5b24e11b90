"""A head that follows its sums, against least squares over the examples that are in them."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from slow_ridge import close, slow_ridge

from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.running_head import RunningHead
from fl_elastic.closed_form.running_sums import RunningSums
from fl_elastic.errors import UpdateError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def examples(
    count: int, features: int, classes: int, seed: int = 0, far: float = 3.0
) -> tuple[Floats, Ints]:
    """Classes around centres, features of very unlike scales and far from zero."""
    draw = np.random.default_rng(seed)
    scales = 10.0 ** draw.uniform(-5, 5, features)
    y = draw.integers(classes, size=count)
    centres = np.random.default_rng(99).normal(size=(classes, features))
    return (centres[y] + draw.normal(size=(count, features)) + far) * scales, y


def exact(head: RunningHead) -> Floats:
    """Weight and bias before they are stretched, in double precision."""
    head.layer()
    weight = head._weight
    return np.vstack([weight[:-1], weight[-1] - head.sums.origin @ weight[:-1]])


@pytest.mark.parametrize("together", [1, 3, 7])
def test_one_after_the_other_it_is_least_squares_with_the_penalty_that_was_fixed(
    together: int,
) -> None:
    x, y = examples(130, 30, 4)
    head = RunningHead(RunningSums(30, 4))
    head.add(x[:70], y[:70])
    head.layer()
    for start in range(70, 130, together):
        head.add(x[start : start + together], y[start : start + together])
        head.layer()
    # The penalty is that of the first seventy.
    spread = 70 * head.penalty * x[:70].var(axis=0)
    rows = np.hstack([x, np.ones((130, 1))])
    products = rows.T @ rows + np.diag([*spread, 0.0])
    wanted = np.linalg.solve(products, rows.T @ np.eye(4)[y])
    assert close(rows @ exact(head), rows @ wanted, 1e-7)
    head.renew()
    fresh = slow_ridge(x, y, 4, head.penalty)
    assert close(rows @ exact(head), rows @ fresh, 1e-8)


def test_after_ten_thousand_changes_the_sums_are_those_of_a_fresh_pass() -> None:
    x, y = examples(600, 10, 6)
    draw, there = np.random.default_rng(1), np.zeros(600, np.bool_)
    head = RunningHead(RunningSums(10, 6))
    head.add(x[:300], y[:300])
    there[:300] = True
    for _ in range(10_000):
        one = draw.integers(600, size=1)
        (head.remove if there[one[0]] else head.add)(x[one], y[one])
        there[one] ^= True
    assert 200 < there.sum() < 400
    fresh = RunningSums(10, 6)
    fresh.origin = head.sums.origin
    rows = fresh.rows(x[there])
    assert close(np.tril(head.sums.products), np.tril(rows.T @ rows), 1e-9)
    assert close(head.sums.targets, rows.T @ np.eye(6)[y[there]], 1e-9)
    # By features of every scale, not by the largest alone.
    own = np.sqrt(np.diag(rows.T @ rows))
    assert np.abs((head.sums.products - rows.T @ rows) / np.outer(own, own)).max() < 1e-9
    assert close(exact(head), slow_ridge(x[there], y[there], 6, head.penalty), 1e-6)


def test_a_corrected_label_is_as_if_it_had_been_right_at_once() -> None:
    x, y = examples(100, 8, 4)
    wrong = np.where(np.arange(100) < 20, (y + 1) % 4, y)
    head = RunningHead(RunningSums(8, 4))
    head.add(x, wrong)
    head.layer()
    head.relabel(x[:20], wrong[:20], y[:20])
    assert close(exact(head), slow_ridge(x, y, 4, head.penalty), 1e-7)


def test_a_new_class_changes_no_other_column() -> None:
    x, y = examples(100, 8, 4)
    head = RunningHead(RunningSums(8, 4))
    head.add(x[:90], y[:90])
    head.layer()
    head.add(x[90:95], y[90:95])
    before = exact(head)
    head.add(x[95:], y[95:])
    head.grow(6)
    assert np.array_equal(exact(head)[:, :4].shape, before.shape)
    assert np.array_equal(exact(head)[:, 4:], np.zeros((9, 2)))
    head.add(x[:1], np.array([5]))
    assert np.abs(exact(head)[:, 5]).max() > 0 and not exact(head)[:, 4].any()
    head.renew()
    every, labels = np.vstack([x, x[:1]]), np.append(y, 5)
    assert close(exact(head), slow_ridge(every, labels, 6, head.penalty), 1e-7)


def test_older_examples_count_less_where_they_are_scaled() -> None:
    x, y = examples(200, 6, 3)
    head = RunningHead(RunningSums(6, 3))
    counts = 0.99 ** np.arange(200)[::-1]
    for place in range(200):
        head.scale(0.99)
        head.add(x[[place]], y[[place]])
    assert close(exact(head), slow_ridge(x, y, 3, head.penalty, counts), 1e-7)
    head.remove(x[:50], y[:50], counts[:50])
    assert close(exact(head), slow_ridge(x[50:], y[50:], 3, head.penalty, counts[50:]), 1e-7)


@pytest.mark.parametrize("count, features", [(40, 4), (100, 60), (60, 300), (400, 40)])
def test_the_penalty_is_that_of_least_error_on_folds(count: int, features: int) -> None:
    x, y = examples(count, features, 5, seed=count)
    y = np.where(np.random.default_rng(5).random(count) < 0.2, (y + 1) % 5, y)
    head = RunningHead(RunningSums(features, 5))
    head.add(x, y)
    mean, scale = x.mean(0), x.std(0)
    z = (x - mean) / scale

    def held_out(penalty: float) -> float:
        error = 0.0
        for part in range(5):
            own = np.arange(count) % 5 == part
            rows = np.hstack([z[~own], np.ones(((~own).sum(), 1))])
            ridge = np.diag([penalty * count] * features + [0.0])
            found = np.linalg.solve(rows.T @ rows + ridge, rows.T @ np.eye(5)[y[~own]])
            error += ((np.eye(5)[y[own]] - z[own] @ found[:-1] - found[-1]) ** 2).sum()
        return float(error)

    chosen = head.choose_penalty(x, y)
    errors = {p: held_out(p) for p in 10.0 ** np.arange(-4, 2.01, 0.5)}
    assert errors[min(errors, key=lambda each: abs(each - chosen))] == min(errors.values())


def test_too_few_examples_change_no_penalty() -> None:
    x, y = examples(4, 3, 2)
    head = RunningHead(RunningSums(3, 2))
    head.add(x, y)
    before = head.penalty
    assert head.choose_penalty(x, y) == before == 1.0


def test_as_they_travel_sums_give_the_same_head() -> None:
    x, y = examples(150, 9, 4, far=1000.0)
    sums = RunningSums(9, 4)
    sums.add(x[:10], y[:10])
    sums.add(x[10:], y[10:])
    found = sums.head_sums("head.weight")
    wanted = HeadSums.of_folds("head.weight", [Fold.of(x, np.eye(4)[y])], 9, 4, True)
    for name in ("products", "targets", "squares"):
        assert np.allclose(getattr(found, name), getattr(wanted, name), rtol=1e-9)
    assert found.num_examples == 150 and found.classes
    some = sums.head_sums("head.weight", [2, -1, 0])
    assert np.array_equal(some.targets[:, 0], found.targets[:, 2]) and not some.targets[:, 1].any()
    with pytest.raises(UpdateError, match="no example is left"):
        RunningSums(9, 4).head_sums("head.weight")
    faded = RunningSums(9, 4)
    faded.add(x, y, np.full(150, 0.33))
    assert faded.head_sums("w").num_examples == 49
    head = closed_form_head(faded.head_sums("head.weight"), found)
    assert np.isfinite(head.weight).all()


def test_times_that_hardly_differ_are_not_swallowed() -> None:
    draw = np.random.default_rng(0)
    x = np.column_stack([1.7e9 + draw.normal(size=200) * 50, draw.normal(size=200)])
    y = (x[:, 0] > 1.7e9).astype(np.int64)
    head = RunningHead(RunningSums(2, 2))
    for place in range(200):
        head.add(x[[place]], y[[place]])
        head.layer()
    said = exact(head)
    centred = np.column_stack([x[:, 0] - head.sums.origin[0], x[:, 1] - head.sums.origin[1]])
    found = centred @ said[:-1] + head._weight[-1]
    assert (found.argmax(1) == y).mean() > 0.9


def test_features_that_stand_still_and_few_examples_do_no_harm() -> None:
    head = RunningHead(RunningSums(4, 2))
    assert not head.layer().weight.any()
    x = np.array([[1.0, 0.0, 5.0, 1e-30]])
    for number in range(3):
        head.add(x * [[1 + number, 1, 1, 1]], np.array([number % 2]))
        assert np.isfinite(head.layer().weight).all() and np.isfinite(head.layer().bias).all()
    for number in range(3):
        head.remove(x * [[1 + number, 1, 1, 1]], np.array([number % 2]))
    assert not head.layer().weight.any() and head.sums.weight == 0


def test_what_was_never_in_them_cannot_be_taken_out() -> None:
    x, y = examples(5, 3, 2)
    head = RunningHead(RunningSums(3, 2))
    head.add(x, y)
    head.remove(x[:1] * 1e6, y[:1])
    with pytest.raises(UpdateError, match="not in them"):
        head.layer()


def test_saved_and_restored_it_goes_on_bit_for_bit() -> None:
    x, y = examples(120, 10, 4)
    head = RunningHead(RunningSums(10, 4))
    head.add(x[:100], y[:100])
    head.layer()
    head.add(x[100:105], y[100:105])
    head.layer()
    head.renew()
    other = RunningHead(RunningSums(10, 4))
    other.restore(RunningSums.of_state(head.sums.to_state()), head.penalty)
    for each in (head, other):
        each.layer()
        for place in range(105, 120):
            each.add(x[[place]], y[[place]])
            each.layer()
    assert np.array_equal(exact(head), exact(other))
    assert head.penalty == other.penalty


@pytest.mark.parametrize("part", ["origin", "products", "targets"])
def test_saved_sums_that_do_not_fit_or_are_not_finite_are_refused(part: str) -> None:
    x, y = examples(20, 3, 2)
    sums = RunningSums(3, 2)
    RunningHead(sums).add(x, y)
    state = sums.to_state()
    known: Floats = getattr(state, part)
    broken = known.copy()
    broken.flat[0] = np.nan
    for value, words in ((broken, "not finite"), (known[:-1], "do not fit")):
        with pytest.raises(UpdateError, match=words):
            replace(state, **{part: value})


@pytest.mark.slow
def test_an_example_costs_far_less_than_to_solve_anew() -> None:
    x, y = examples(600, 1024, 10)
    head = RunningHead(RunningSums(1024, 10))
    head.add(x[:512], y[:512])
    began = time.perf_counter()
    head.layer()
    anew = time.perf_counter() - began
    began = time.perf_counter()
    for place in range(512, 532):
        head.add(x[[place]], y[[place]])
        head.layer()
    assert (time.perf_counter() - began) / 20 < anew / 2


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rest", [0.0, 0.25])
def test_a_feature_that_only_forgotten_examples_had_gets_no_weight(seed: int, rest: float) -> None:
    draw = np.random.default_rng(seed)
    x, y = np.abs(draw.normal(size=(60, 4))), draw.permutation(np.arange(60) % 3)
    x[y != 2, 3] = rest
    head, others = RunningHead(RunningSums(4, 3)), RunningHead(RunningSums(4, 3))
    for place in range(60):
        head.add(x[[place]], y[[place]])
    head.remove(x[y == 2], y[y == 2])
    others.add(x[y != 2], y[y != 2])
    for found, expected in (
        (head.layer(), others.layer()),
        (closed_form_head(head.sums.head_sums("w")), closed_form_head(others.sums.head_sums("w"))),
    ):
        assert np.abs(expected.weight[:, 3]).max() < 1e-12
        np.testing.assert_allclose(found.weight, expected.weight, atol=1e-6)


def test_a_dead_feature_far_from_the_origin_travels_as_a_constant() -> None:
    x, y = np.abs(np.random.default_rng(0).normal(size=(11, 4))), np.arange(11) % 3
    x[1:, 3] = 0.0
    sums = RunningSums(4, 3)
    for place in range(11):
        sums.add(x[[place]], y[[place]])
    sums.remove(x[:1], y[:1])
    found = sums.head_sums("weight")
    assert not found.products[3].any() and not found.targets[3].any()
