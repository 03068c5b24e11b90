"""The sum of whole models: as exact as Flower's FedAvg or more, whatever the order, weights and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from numpy.typing import NDArray

from fl_elastic.aggregation import MergeOptions, PartialMean
from fl_elastic.aggregation.sums import Addend, FlatSum, joined
from fl_elastic.update import Manifest, PartialUpdate, decode, encode
from fl_elastic.update.checks import Limits
from fl_elastic.update.manifest import Role

SIZE = 150_000
MANIFEST = Manifest(("w", "b"), ((SIZE,), (7,)), ("float32",) * 2, (Role.PARAMETER,) * 2)
ZERO = {name: np.zeros(MANIFEST.shape(name), np.float32) for name in MANIFEST.names}
Deltas = dict[str, NDArray[np.float32]]


def deltas_of(clients: int) -> tuple[list[Deltas], list[int]]:
    rng = np.random.default_rng(clients)
    # Scales from a thousandth to a thousand, so that rounding shows.
    scale = np.exp(rng.uniform(-7, 7, SIZE))
    found = [
        {
            "w": (scale * rng.standard_normal(SIZE)).astype(np.float32),
            "b": rng.standard_normal(7).astype(np.float32),
        }
        for _ in range(clients)
    ]
    return found, rng.integers(1, 100_000, clients).tolist()


def ours(deltas: list[Deltas], examples: list[int]) -> Deltas:
    mean = PartialMean(MANIFEST)
    for each, count in zip(deltas, examples, strict=True):
        update = PartialUpdate(dict(each), dict.fromkeys(each, 3), count)
        mean.add(decode(encode(update, MANIFEST), MANIFEST), checked=True)
    return mean.finish(ZERO)


def flowers(deltas: list[Deltas], examples: list[int]) -> NDArray[Any]:
    records = [
        RecordDict({"a": ArrayRecord({"w": Array(d["w"])}), "m": MetricRecord({"n": count})})
        for d, count in zip(deltas, examples, strict=True)
    ]
    return aggregate_arrayrecords(records, "n")["w"].numpy()


@pytest.mark.parametrize("clients", [2, 10, 60])
def test_the_error_is_not_larger_than_flowers(clients: int) -> None:
    deltas, examples = deltas_of(clients)
    exact = np.average(
        [np.asarray(d["w"], np.longdouble) for d in deltas], axis=0, weights=examples
    )
    size = np.average([np.abs(d["w"]).astype(float) for d in deltas], axis=0, weights=examples)
    our_error = np.abs(ours(deltas, examples)["w"] - exact) / size
    flowers_error = np.abs(flowers(deltas, examples) - exact) / size
    assert our_error.mean() <= flowers_error.mean()
    assert our_error.max() <= flowers_error.max()
    assert our_error.max() < 1.5e-7


def test_the_order_of_replies_is_rounded_away() -> None:
    deltas, examples = deltas_of(20)
    forward = ours(deltas, examples)["w"]
    back = ours(deltas[::-1], examples[::-1])["w"]
    differ = forward != back
    # Where the sum lies within 1e-16 of the middle between two floats it may go either way.
    assert differ.mean() < 1e-4
    assert np.allclose(forward, back, rtol=2e-7, atol=0)
    in_singles = np.zeros((2, SIZE), np.float32)
    for row, step in ((0, 1), (1, -1)):
        for each, count in list(zip(deltas, examples, strict=True))[::step]:
            in_singles[row] += each["w"] * np.float32(count)
    assert (in_singles[0] != in_singles[1]).mean() > 0.1


def test_the_same_replies_give_the_same_bits() -> None:
    deltas, examples = deltas_of(5)
    assert np.array_equal(ours(deltas, examples)["w"], ours(deltas, examples)["w"])


def test_the_largest_believed_changes_and_weights_do_not_overflow() -> None:
    for limits in (Limits(), Limits(max_change=3e38, max_examples=10**12)):
        largest = 0.99 * min(limits.max_change, float(np.finfo(np.float32).max) / 4)
        mean = PartialMean(MANIFEST, "inverse_probability", limits=limits)
        for _ in range(3):
            full = PartialUpdate(
                {"w": np.full(SIZE, largest, np.float32)}, {"w": 1}, limits.max_examples
            )
            mean.add(full, probabilities={"w": 1e-9})
        assert np.allclose(mean.finish(ZERO)["w"], largest, rtol=1e-6, atol=0)


def test_doubles_are_summed_as_doubles() -> None:
    mean = PartialMean(MANIFEST)
    for value, count in ((1 + 1e-12, 3), (-1.0, 3)):
        mean.add(PartialUpdate({"w": np.full(SIZE, value)}, {"w": 1}, count))
    assert mean.finish(ZERO)["w"][0] == pytest.approx(5e-13, rel=1e-3)


def test_fractions_of_a_weight_are_those_of_fednova_and_staleness() -> None:
    mean = PartialMean(MANIFEST, options=MergeOptions(normalise_steps=True))
    for steps, stale in ((3, 0), (7, 2)):
        mean.add(
            PartialUpdate({"w": np.full(SIZE, steps, np.float32)}, {"w": steps}, 10),
            staleness=stale,
        )
    light = 10 * 3**-0.5
    expected = (10 * 3 + light * 7) / (10 + light)
    assert np.allclose(mean.finish(ZERO)["w"], expected, rtol=2e-7, atol=0)


def test_runs_are_joined_only_where_they_go_on() -> None:
    numbers, others = np.arange(9.0), np.arange(9.0)
    first = Addend(numbers, 0, 0, 2, 1.0)
    for second in (
        Addend(numbers, 3, 2, 1, 1.0),
        Addend(numbers, 2, 3, 1, 1.0),
        Addend(numbers, 2, 2, 1, 2.0),
        Addend(others, 2, 2, 1, 1.0),
    ):
        assert list(joined([first, second])) == [first, second]
    follows = Addend(numbers, 2, 2, 3, 1.0)
    assert list(joined([first, follows])) == [Addend(numbers, 0, 0, 5, 1.0)]
    assert list(joined([])) == []


@pytest.mark.parametrize("size", [0, 1, 64_999, 65_000, 65_001, 65_536, SIZE])
def test_pieces_of_any_length_are_added_whole(size: int) -> None:
    total = FlatSum(MANIFEST)
    numbers = np.arange(SIZE + 1, dtype=np.float32)
    total.add([Addend(numbers, 1, 0, size, 2.0)])
    assert np.array_equal(total.of("w")[:size], 2.0 * numbers[1 : size + 1])
    assert not total.of("w")[size:].any() and not total.of("b").any()


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("waits", [True, False])
def test_updates_that_wait_for_each_other_are_added_all_the_same(count: int, waits: bool) -> None:
    """Of the same region, of others, and of other types."""
    rng = np.random.default_rng(count)
    total, expected = FlatSum(MANIFEST), np.zeros(SIZE + 7)
    for number in range(count):
        numbers = rng.standard_normal(SIZE + 9)
        numbers = numbers.astype(np.float32) if number % 3 else numbers
        addends = [
            Addend(numbers, 1, 0, SIZE, 2.0 + number),
            Addend(numbers, 0, SIZE + number % 2, 5, 1.0),
        ]
        total.add(addends, waits=waits)
        for each in addends:
            expected[each.to : each.to + each.size] += each.factor * each.numbers[
                each.start : each.start + each.size
            ].astype(float)
    np.testing.assert_allclose(total.of("w"), expected[:SIZE], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(total.of("b"), expected[SIZE:], rtol=1e-12, atol=1e-12)


def test_numbers_that_are_not_given_away_may_change_after_they_were_added() -> None:
    mean, numbers = PartialMean(MANIFEST), np.full(SIZE, 1.0, np.float32)
    for value in (1.0, 3.0):
        numbers[:] = value
        mean.add(PartialUpdate({"w": numbers}, {"w": 1}, 1))
    assert np.array_equal(mean.finish(ZERO)["w"], np.full(SIZE, 2.0, np.float32))


def packed_updates(count: int, codec: str) -> list[bytes]:
    deltas, examples = deltas_of(count)
    return [
        encode(PartialUpdate(dict(each), dict.fromkeys(each, 3), weight), MANIFEST, codec)
        for each, weight in zip(deltas, examples, strict=True)
    ]


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "topk"])
@pytest.mark.parametrize("rule", ["contributors", "median", "products"])
def test_memory_that_is_used_again_changes_no_sum(codec: str, rule: str) -> None:
    plain, again = PartialMean(MANIFEST, rule), PartialMean(MANIFEST, rule)
    for packed in packed_updates(11, codec):
        plain.add(decode(packed, MANIFEST), checked=True)
        update = decode(packed, MANIFEST, in_place=True, memory=again.memory)
        again.add(update, checked=True)
    expected, found = plain.finish(ZERO), again.finish(ZERO)
    for name in ZERO:
        np.testing.assert_array_equal(found[name], expected[name])


def test_numbers_are_written_over_once_they_are_in_the_sum_and_not_before() -> None:
    mean = PartialMean(MANIFEST)
    refused, *others = packed_updates(12, "int8")
    left_out = decode(refused, MANIFEST, memory=mean.memory)
    before = {name: delta.copy() for name, delta in left_out.deltas.items()}
    arrays = set()
    for packed in others:
        update = decode(packed, MANIFEST, memory=mean.memory)
        arrays.add(update.deltas["w"].ctypes.data)
        mean.add(update, checked=True)
        del update
    assert len(arrays) <= 5 and left_out.deltas["w"].ctypes.data not in arrays
    for name, delta in before.items():
        np.testing.assert_array_equal(left_out.deltas[name], delta)
