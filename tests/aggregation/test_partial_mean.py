"""Merging partial updates: against FedAvg and plain formulas, in any order, in constant memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_models import conv_net

from fl_elastic.aggregation import RULES, PartialMean
from fl_elastic.aggregation.sums import FlatSum, TensorSum
from fl_elastic.errors import RegistryError, UpdateError
from fl_elastic.testing import Check, name_of, rule_checks
from fl_elastic.update import Manifest, PartialUpdate, weights_of
from fl_elastic.update.checks import Limits
from fl_elastic.update.manifest import Role

NAMES = ["all", "contributors", "inverse_probability", "inverse_share", "products"]
ROBUST = ["krum", "median", "norm_clipping", "trimmed_mean"]
every_rule = pytest.mark.parametrize("rule", NAMES)
Weights = dict[str, NDArray[Any]]

DOUBLE = Manifest(
    ("a", "b", "mean", "count"),
    ((2, 2), (), (3,), (2,)),
    ("float64", "float64", "float64", "int64"),
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.COUNTER),
)
FLOATS = ("a", "b", "mean")


def base_of(manifest: Manifest = DOUBLE) -> Weights:
    rng = np.random.default_rng(0)
    return {
        name: (10 * rng.standard_normal(manifest.shape(name))).astype(manifest.array_dtype(name))
        for name in manifest.names
    }


def random_update(rng: np.random.Generator, names: tuple[str, ...]) -> PartialUpdate:
    deltas = {name: rng.standard_normal(DOUBLE.shape(name)) for name in names}
    steps = {name: int(rng.integers(1, 50)) for name in names}
    return PartialUpdate(deltas, steps, int(rng.integers(1, 1000)))


def merged(updates: list[PartialUpdate], rule: str, base: Weights) -> Weights:
    mean = PartialMean(DOUBLE, rule)
    for update in updates:
        mean.add(update)
    return mean.finish(base)


def fedavg(models: list[Weights], examples: list[int]) -> Weights:
    """Six lines: the weighted mean of whole models."""
    result = {}
    for name in FLOATS:
        stacked = np.stack([model[name] for model in models])
        result[name] = np.average(stacked, axis=0, weights=examples)
    return result


def test_the_registered_rules_are_all_checked() -> None:
    assert RULES.names() == sorted(NAMES + ROBUST)
    assert len(rule_checks()) == 9
    assert len({name_of(check) for check in rule_checks()}) == 9


@pytest.mark.parametrize("check", rule_checks(), ids=name_of)
@pytest.mark.parametrize("rule", NAMES + ROBUST)
def test_rule_conforms(rule: str, check: Check) -> None:
    made = RULES.make(rule)
    check(made)
    check(type(made))
    assert isinstance(made, type(RULES.make(rule)))


def test_an_unknown_rule_lists_the_known() -> None:
    with pytest.raises(
        RegistryError, match=r"unknown aggregation rule 'al'.*known are all, contri"
    ):
        PartialMean(DOUBLE, "al")


@every_rule
@pytest.mark.parametrize("clients", [1, 2, 7])
def test_everything_from_everyone_is_fedavg(rule: str, clients: int) -> None:
    rng = np.random.default_rng(clients)
    base = base_of()
    updates = [random_update(rng, FLOATS) for _ in range(clients)]
    models = [{n: base[n] + update.deltas[n] for n in FLOATS} for update in updates]
    expected = fedavg(models, [update.num_examples for update in updates])
    result = merged(updates, rule, base)
    for name in FLOATS:
        assert result[name] == pytest.approx(expected[name], rel=1e-12, abs=1e-12)


@st.composite
def rounds(draw: st.DrawFn) -> list[PartialUpdate]:
    """Draw clients that trained different parts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parts = draw(st.lists(st.sets(st.sampled_from(FLOATS)), min_size=1, max_size=6))
    return [random_update(rng, tuple(sorted(part))) for part in parts]


@every_rule
@given(updates=rounds(), data=st.data())
def test_the_order_of_adding_does_not_matter(
    rule: str, updates: list[PartialUpdate], data: st.DataObject
) -> None:
    base = base_of()
    once = merged(updates, rule, base)
    again = merged(data.draw(st.permutations(updates)), rule, base)
    for name in DOUBLE.names:
        assert once[name] == pytest.approx(again[name], rel=1e-12, abs=1e-12)


@given(updates=rounds())
def test_contributors_is_the_mean_over_those_who_trained(updates: list[PartialUpdate]) -> None:
    base = base_of()
    result = merged(updates, "contributors", base)
    for name in FLOATS:
        who = [update for update in updates if name in update.deltas]
        expected = base[name].copy()
        if who:
            total = sum(update.num_examples for update in who)
            expected += sum(u.num_examples / total * u.deltas[name] for u in who)
        assert result[name] == pytest.approx(expected, rel=1e-11, abs=1e-11)


@given(updates=rounds())
def test_all_counts_the_absent_as_unchanged(updates: list[PartialUpdate]) -> None:
    base = base_of()
    result = merged(updates, "all", base)
    total = sum(update.num_examples for update in updates)
    for name in ("a", "b"):
        zero = np.zeros(DOUBLE.shape(name))
        expected = base[name] + sum(
            update.num_examples / total * update.deltas.get(name, zero) for update in updates
        )
        assert result[name] == pytest.approx(expected, rel=1e-11, abs=1e-11)


@given(updates=rounds())
def test_statistics_are_averaged_over_their_observers_under_every_linear_rule(
    updates: list[PartialUpdate],
) -> None:
    base = base_of()
    first, *others = (merged(updates, rule, base)["mean"] for rule in NAMES)
    assert all(np.array_equal(first, other) for other in others)


@every_rule
def test_what_nobody_trained_is_the_bases(rule: str) -> None:
    base = base_of()
    rng = np.random.default_rng(0)
    result = merged([random_update(rng, ("a",)), random_update(rng, ())], rule, base)
    assert np.array_equal(result["b"], base["b"]) and np.array_equal(result["mean"], base["mean"])
    assert not np.array_equal(result["a"], base["a"])
    nobody = merged([], rule, base)
    assert all(np.array_equal(nobody[name], base[name]) for name in DOUBLE.names)


def test_integers_are_never_touched() -> None:
    base = base_of() | {"count": np.array([2**60 + 1, -3])}
    rng = np.random.default_rng(0)
    result = merged([random_update(rng, FLOATS)], "contributors", base)
    assert result["count"].dtype == np.int64 and np.array_equal(result["count"], base["count"])
    with pytest.raises(UpdateError, match="never averaged"):
        PartialMean(DOUBLE).add(PartialUpdate({"count": np.ones(2)}, {"count": 1}, 1))


def test_the_base_is_left_alone_and_the_result_is_ones_own() -> None:
    base = base_of()
    before = {name: array.copy() for name, array in base.items()}
    mean = PartialMean(DOUBLE)
    mean.add(random_update(np.random.default_rng(0), ("a",)))
    result = mean.finish(base)
    for array in result.values():
        array[...] = 0
    assert all(np.array_equal(base[name], before[name]) for name in base)
    assert list(result) == list(DOUBLE.names)
    assert np.array_equal(mean.finish(base)["a"], mean.finish(base)["a"])
    assert not np.array_equal(mean.finish(base)["a"], result["a"])


def bad_updates() -> list[PartialUpdate]:
    good, bad = np.ones((2, 2)), np.array([1.0, np.nan, 0.0])
    both = {"a": 1, "mean": 1}
    return [
        PartialUpdate({"a": good, "mean": bad}, both, 5),
        PartialUpdate({"a": good, "mean": np.ones(4)}, both, 5),
        PartialUpdate({"a": good, "other": np.ones(3)}, {"a": 1, "other": 1}, 5),
        PartialUpdate({"a": good, "mean": np.ones(3)}, {"a": 1, "mean": 0}, 5),
        PartialUpdate({"a": good}, {"a": 1}, 0),
        PartialUpdate({"a": good}, {}, 5),
    ]


@every_rule
@pytest.mark.parametrize("case", range(6))
def test_a_rejected_update_leaves_the_sums_as_they_were(rule: str, case: int) -> None:
    rng = np.random.default_rng(1)
    base, mean = base_of(), PartialMean(DOUBLE, rule)
    mean.add(random_update(rng, ("a", "mean")))
    before, clients = mean.finish(base), mean.clients
    with pytest.raises(UpdateError):
        mean.add(bad_updates()[case])
    after = mean.finish(base)
    assert mean.clients == clients == 1
    assert all(np.array_equal(before[name], after[name]) for name in DOUBLE.names)


def test_limits_are_the_servers_own() -> None:
    update = PartialUpdate({"b": np.array(1.0)}, {"b": 9}, 5)
    with pytest.raises(UpdateError, match="step count"):
        PartialMean(DOUBLE, limits=Limits(max_steps=8)).add(update)
    mean = PartialMean(DOUBLE, limits=Limits(max_steps=9))
    mean.add(update)
    assert mean.clients == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_the_tensors_dtype_is_restored(dtype: str) -> None:
    manifest = Manifest(("w",), ((3,),), (dtype,), (Role.PARAMETER,))
    expected = "float32" if dtype == "bfloat16" else dtype
    mean = PartialMean(manifest)
    mean.add(PartialUpdate({"w": np.ones(3, np.float32)}, {"w": 1}, 1))
    result = mean.finish({"w": np.zeros(3)})["w"]
    assert result.dtype == np.dtype(expected) and (result == 1).all()
    untouched = PartialMean(manifest).finish({"w": np.zeros(3)})["w"]
    assert untouched.dtype == np.dtype(expected)


def test_small_changes_of_many_clients_are_not_lost() -> None:
    # In half precision each of these is too small to change a sum of a few hundred.
    manifest = Manifest(("w",), ((1,),), ("float16",), (Role.PARAMETER,))
    mean = PartialMean(manifest)
    for _ in range(2000):
        mean.add(PartialUpdate({"w": np.array([0.1], np.float16)}, {"w": 1}, 1))
    result = mean.finish({"w": np.array([1.0], np.float16)})["w"]
    assert result[0] == pytest.approx(1.1, rel=1e-3)


def test_a_sum_beyond_the_dtype_is_refused() -> None:
    manifest = Manifest(("w",), ((1,),), ("float16",), (Role.PARAMETER,))
    mean = PartialMean(manifest)
    mean.add(PartialUpdate({"w": np.array([10_000.0])}, {"w": 1}, 1))
    assert mean.finish({"w": np.array([50_000.0])})["w"][0] == 60_000
    with pytest.raises(UpdateError, match="'w' is beyond the range of float16"):
        mean.finish({"w": np.array([60_000.0])})


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_base_that_does_not_fit_is_refused(change: str) -> None:
    base = base_of()
    if change == "missing":
        del base["b"]
    elif change == "extra":
        base["more"] = np.zeros(1)
    else:
        base["a"] = np.zeros((2, 3))
    with pytest.raises(UpdateError):
        PartialMean(DOUBLE).finish(base)


def test_no_update_is_kept() -> None:
    mean = PartialMean(DOUBLE)
    update = PartialUpdate({"a": np.ones((2, 2)), "b": np.array(1.0)}, {"a": 1, "b": 1}, 1)
    kept: list[weakref.ref[Any]] = [weakref.ref(update)]
    kept += [weakref.ref(delta) for delta in update.deltas.values()]
    mean.add(update)
    del update
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]
    assert mean.clients == 1


def test_changing_an_update_after_adding_changes_nothing() -> None:
    mean, base = PartialMean(DOUBLE), base_of()
    update = random_update(np.random.default_rng(2), FLOATS)
    mean.add(update)
    before = mean.finish(base)
    for delta in update.deltas.values():
        delta += 100
    after = mean.finish(base)
    assert all(np.array_equal(before[name], after[name]) for name in DOUBLE.names)


def test_memory_does_not_grow_with_the_clients() -> None:
    mean = PartialMean(DOUBLE)
    rng = np.random.default_rng(3)
    mean.add(random_update(rng, FLOATS))
    one = sum(array.nbytes for array in gc_arrays(mean))
    for _ in range(50):
        mean.add(random_update(rng, FLOATS))
    assert sum(array.nbytes for array in gc_arrays(mean)) == one > 0


def gc_arrays(root: object) -> list[NDArray[Any]]:
    """Every array that can be reached from an object's own attributes."""
    found: list[NDArray[Any]] = []
    stack = list(vars(root).values())
    while stack:
        value = stack.pop()
        if isinstance(value, np.ndarray):
            found.append(value)
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, (list, tuple, set)):
            stack += value
        elif isinstance(value, FlatSum):
            stack += vars(value).values()
        elif isinstance(value, TensorSum):
            stack += [getattr(value, slot) for slot in value.__slots__]
    return found


def test_a_real_model_is_merged_in_its_own_names() -> None:
    model = conv_net()
    manifest = Manifest.of(model)
    base = weights_of(model, manifest)
    deltas: Weights = {"11.weight": np.full((3, 8), 0.5), "1.running_mean": np.ones(4)}
    mean = PartialMean(manifest)
    mean.add(PartialUpdate(deltas, {"11.weight": 2, "1.running_mean": 2}, 7))
    mean.add(PartialUpdate({}, {}, 93))
    result = mean.finish(base)
    assert np.array_equal(result["11.weight"], base["11.weight"] + np.float32(0.5))
    assert np.array_equal(result["1.running_mean"], base["1.running_mean"] + 1)
    changed = [name for name in manifest.names if not np.array_equal(result[name], base[name])]
    assert changed == ["1.running_mean", "11.weight"]
