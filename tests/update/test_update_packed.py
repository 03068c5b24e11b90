"""Deltas that share an array: they behave as any others, and whether they still share it is known."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_elastic.aggregation import PartialMean
from fl_elastic.errors import UpdateError
from fl_elastic.update import Manifest, PartialUpdate, decode, encode
from fl_elastic.update.checks import Limits, check_update
from fl_elastic.update.manifest import Role
from fl_elastic.update.partial import PackedDeltas

MANIFEST = Manifest(
    ("a", "b", "s", "count", "c"),
    ((2, 3), (4,), (2,), (), ()),
    ("float32", "float16", "float32", "int64", "float32"),
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.COUNTER, Role.PARAMETER),
)
FLOATS = ("a", "b", "s", "c")
BASE = {name: np.zeros(MANIFEST.shape(name), MANIFEST.array_dtype(name)) for name in MANIFEST.names}


def written(**changes: NDArray[Any]) -> bytes:
    rng = np.random.default_rng(0)
    deltas = {n: rng.standard_normal(MANIFEST.shape(n)).astype(np.float32) for n in FLOATS}
    return encode(PartialUpdate(deltas | changes, dict.fromkeys(FLOATS, 2), 3), MANIFEST)


def packed(data: bytes | bytearray | None = None, **options: Any) -> PartialUpdate:
    update = decode(memoryview(data or written()), MANIFEST, **options)
    assert isinstance(update.deltas, PackedDeltas)
    return update


def plain(update: PartialUpdate) -> PartialUpdate:
    deltas = {name: np.array(delta) for name, delta in update.deltas.items()}
    return PartialUpdate(deltas, update.steps, update.num_examples, update.base_version)


def merged(*updates: PartialUpdate, **settings: Any) -> dict[str, NDArray[Any]]:
    mean = PartialMean(MANIFEST, **settings)
    for update in updates:
        mean.add(update)
    return mean.finish(BASE)


def same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in MANIFEST.names)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "topk"])
def test_codecs_give_deltas_in_one_array(codec: str) -> None:
    update = decode(encode(decode(written(), MANIFEST), MANIFEST, codec), MANIFEST)
    assert isinstance(update.deltas, PackedDeltas)
    assert [update.deltas.start(name) for name in FLOATS] == [0, 6, 10, 12]
    assert all(np.shares_memory(update.deltas[n], update.deltas.flat) for n in FLOATS)


@pytest.mark.parametrize("rule", ["contributors", "all", "inverse_probability", "median"])
def test_one_array_is_merged_as_separate_ones(rule: str) -> None:
    update = packed()
    assert same(merged(update, rule=rule), merged(plain(update), rule=rule))


def test_changes_in_place_count() -> None:
    update = packed()
    update.deltas["b"][1] = 7.0
    update.deltas["s"] += 1
    assert same(merged(update), merged(plain(update)))
    update.deltas["a"][0, 0] = np.nan
    with pytest.raises(UpdateError, match="'a' holds NaN"):
        check_update(update, MANIFEST)


def test_replaced_swapped_and_removed_entries_count() -> None:
    update = packed()
    update.deltas["b"] = np.full(4, 2.0, np.float32)
    assert update.deltas.start("b") is None  # type: ignore[attr-defined]
    assert merged(update)["b"].tolist() == [2.0] * 4
    del update.deltas["s"], update.steps["s"]
    assert not merged(update)["s"].any()
    update.deltas["b"] = np.array([0, np.inf, 0, 0])
    with pytest.raises(UpdateError, match="'b' holds NaN or infinite"):
        check_update(update, MANIFEST)
    update.deltas["b"] = np.zeros(4, complex)
    with pytest.raises(UpdateError, match="real numbers"):
        check_update(update, MANIFEST)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, dict, lambda d: pickle.loads(pickle.dumps(d))]
)
def test_copies_are_plain(copied: Any) -> None:
    deltas = packed().deltas
    other = copied(deltas)
    assert type(other) is dict and list(other) == list(deltas)
    assert all(np.array_equal(other[name], deltas[name]) for name in deltas)


def test_one_number_too_large_names_its_tensor_and_leaves_the_others() -> None:
    # 20,000 is within fp32 and beyond a quarter of fp16.
    wide = packed(written(a=np.full((2, 3), 2e4, np.float32)))
    check_update(wide, MANIFEST)
    with pytest.raises(UpdateError, match="'b' reaches 2e\\+04"):
        packed(written(b=np.full(4, 2e4, np.float32)))
    with pytest.raises(UpdateError, match="'a' reaches"):
        check_update(wide, MANIFEST, Limits(max_change=1e4))


@pytest.mark.parametrize("place", [0, 5, 6, 9, 10, 12])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e31])
def test_no_impossible_number_hides_in_the_array(place: int, value: float) -> None:
    update = packed()
    update.deltas.flat[place] = value  # type: ignore[attr-defined]
    with pytest.raises(UpdateError, match=r"NaN or infinite|reaches"):
        check_update(update, MANIFEST)
    with pytest.raises(UpdateError, match=r"NaN or infinite|reaches"):
        PartialMean(MANIFEST).add(update)


@pytest.mark.parametrize("value", [np.nan, np.inf, -3e38])
@pytest.mark.parametrize("place", [0, 65_535, 65_536, 131_071, 140_000])
def test_long_arrays_are_looked_at_to_the_end(place: int, value: float) -> None:
    manifest = Manifest(("w",), ((140_001,),), ("float32",), (Role.PARAMETER,))
    deltas = PackedDeltas(np.zeros(140_001, np.float32))
    deltas.lay("w", 0, (140_001,))
    check_update(PartialUpdate(deltas, {"w": 1}, 1), manifest)
    deltas.flat[place] = value
    with pytest.raises(UpdateError, match="'w'"):
        check_update(PartialUpdate(deltas, {"w": 1}, 1), manifest)


def test_only_in_place_do_deltas_lie_in_the_buffer() -> None:
    # Long enough to be written where numbers can be read.
    wide = Manifest(("w",), ((2000,),), ("float32",), (Role.PARAMETER,))
    delta = np.random.default_rng(1).standard_normal(2000).astype(np.float32)
    data = bytearray(encode(PartialUpdate({"w": delta}, {"w": 1}, 1), wide))
    whole = np.frombuffer(data, np.uint8)
    own, shared = (decode(memoryview(data), wide, in_place=on).deltas["w"] for on in (False, True))
    assert not np.shares_memory(own, whole) and np.shares_memory(shared, whole)
    fixed = decode(bytes(data), wide, in_place=True).deltas["w"]
    assert not fixed.flags.writeable and own.flags.writeable
    assert all(np.array_equal(each, delta) for each in (own, shared, fixed))


@pytest.mark.parametrize("offset", [1, 2, 4, 16])
def test_a_buffer_anywhere_in_memory_is_read(offset: int) -> None:
    data = memoryview(b"x" * offset + written())[offset:]
    for in_place in (False, True):
        assert same(merged(decode(data, MANIFEST, in_place=in_place)), merged(packed()))


def test_slices_of_zeros_lie_elsewhere() -> None:
    wide = Manifest(("w", "v"), ((8, 40), (3,)), ("float32",) * 2, (Role.PARAMETER,) * 2)
    delta = np.zeros((8, 40), np.float32)
    delta[2] = 1.0
    update = PartialUpdate({"w": delta, "v": np.ones(3, np.float32)}, {"w": 1, "v": 1}, 1)
    back = decode(encode(update, wide), wide)
    assert isinstance(back.deltas, PackedDeltas)
    assert (back.deltas.start("w"), back.deltas.start("v")) == (None, 40)
    mean = PartialMean(wide)
    mean.add(back)
    result = mean.finish({"w": np.zeros((8, 40), np.float32), "v": np.zeros(3, np.float32)})
    assert np.array_equal(result["w"], delta) and result["v"].tolist() == [1.0] * 3
