"""Only changed tensors travel to a client that holds an earlier model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_models import conv_net

from fl_elastic.errors import StaleModelError, UpdateError
from fl_elastic.flower.downlink import ChangeLog
from fl_elastic.update import Manifest, weights_of
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_wire import decode_weights, encode_weights

MODEL = conv_net()
MANIFEST = Manifest.of(MODEL)
OLD = weights_of(MODEL, MANIFEST)
Weights = dict[str, NDArray[Any]]


def moved(weights: Weights, names: Collection[str], seed: int = 0) -> Weights:
    generator = np.random.default_rng(seed)
    return {
        name: (array + generator.uniform(1, 9, array.shape)).astype(array.dtype)
        if name in names
        else array
        for name, array in weights.items()
    }


def same(a: Weights, b: Weights) -> bool:
    return list(a) == list(b) and all(a[name].tobytes() == b[name].tobytes() for name in a)


@settings(max_examples=30)
@given(
    names=st.sets(st.sampled_from(MANIFEST.names)),
    codec=st.sampled_from(["fp32", "fp16", "bf16"]),
    since=st.integers(0, 5),
    version=st.integers(5, 9),
)
def test_the_changed_tensors_make_the_same_model_as_the_whole(
    names: set[str], codec: str, since: int, version: int
) -> None:
    new = moved(OLD, names)
    known = decode_weights(encode_weights(OLD, MANIFEST, version=since, codec=codec), MANIFEST)
    before = {name: array.copy() for name, array in known[0].items()}
    whole = encode_weights(new, MANIFEST, version=version, codec=codec)
    data = encode_weights(new, MANIFEST, version=version, codec=codec, since=since, names=names)
    expected, _ = decode_weights(whole, MANIFEST)
    found, seen = decode_weights(memoryview(data), MANIFEST, known)
    assert seen == version and same(found, expected)
    assert len(data) < len(whole) or len(names) > len(MANIFEST) // 2
    # The known model is left alone, and shares no memory with what came out of it.
    for array in found.values():
        array += 1
    assert same(known[0], before)


def test_without_names_the_whole_model_travels() -> None:
    data = encode_weights(OLD, MANIFEST, version=4, since=3, names=None)
    assert data == encode_weights(OLD, MANIFEST, version=4)
    for known in (None, (OLD, 2), ({}, 9)):
        assert same(decode_weights(data, MANIFEST, known)[0], OLD)


def test_a_model_of_another_version_is_stale() -> None:
    data = encode_weights(OLD, MANIFEST, version=4, since=3, names={"0.bias"})
    for known, what in [(None, "no model is held"), ((OLD, 2), "version 2 is held"),
                        ((OLD, 4), "version 4 is held"), (({}, 3), "missing")]:  # fmt: skip
        with pytest.raises(StaleModelError, match=what) as caught:
            decode_weights(data, MANIFEST, known)
        assert "ask for the full model" in str(caught.value)
    assert issubclass(StaleModelError, UpdateError)


@pytest.mark.parametrize("name", MANIFEST.names)
def test_a_model_that_drifted_is_stale(name: str) -> None:
    other = {n: array.copy() for n, array in OLD.items()}
    other[name].reshape(-1)[-1] += 1
    sent = "0.weight" if name != "0.weight" else "0.bias"
    data = encode_weights(OLD, MANIFEST, version=4, since=3, names={sent})
    with pytest.raises(StaleModelError, match="do not turn the model held here"):
        decode_weights(data, MANIFEST, (other, 3))
    # What arrives anew need not have been right.
    data = encode_weights(OLD, MANIFEST, version=4, since=3, names={name})
    assert same(decode_weights(data, MANIFEST, (other, 3))[0], OLD)


def test_another_codec_than_before_is_stale_where_it_would_differ() -> None:
    half = decode_weights(encode_weights(OLD, MANIFEST, version=3, codec="fp16"), MANIFEST)
    data = encode_weights(OLD, MANIFEST, version=4, since=3, names={"0.bias"})
    with pytest.raises(StaleModelError):
        decode_weights(data, MANIFEST, half)


def test_names_need_a_version_to_start_from() -> None:
    for since in (None, -1, 5, 1.0, True):
        with pytest.raises(UpdateError, match="since"):
            encode_weights(OLD, MANIFEST, version=4, since=since, names={"0.bias"})  # type: ignore[arg-type]
    with pytest.raises(UpdateError, match="'nonsense'"):
        encode_weights(OLD, MANIFEST, version=4, since=3, names={"nonsense"})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_arrays_of_other_precision_are_what_the_receiver_holds(dtype: str) -> None:
    manifest = Manifest(("w", "v"), ((3,), (2,)), (dtype, dtype), (Role.PARAMETER, Role.STATISTIC))
    # A server may sum up in another precision than the model has.
    wide = {"w": np.array([0.1, 1 / 3, 70.7]), "v": np.array([1e-3, 2.2])}
    known = decode_weights(encode_weights(wide, manifest, version=1), manifest)
    data = encode_weights(wide, manifest, version=2, since=1, names={"v"})
    assert same(decode_weights(data, manifest, known)[0], known[0])


@settings(max_examples=20)
@given(
    rounds=st.lists(st.sets(st.sampled_from(MANIFEST.names), max_size=5), min_size=1, max_size=6),
    online=st.lists(st.booleans(), min_size=6, max_size=6),
    codec=st.sampled_from(["fp32", "fp16"]),
)
def test_a_client_that_comes_and_goes_always_has_the_servers_model(
    rounds: list[set[str]], online: list[bool], codec: str
) -> None:
    model, log = OLD, ChangeLog()
    log.record(0, {}, model)
    known: tuple[Weights, int] | None = None
    for version, (names, here) in enumerate(zip(rounds, online, strict=False), start=1):
        new = moved(model, names, version)
        log.record(version, model, new)
        model = new
        if here:
            since = None if known is None else known[1]
            data = encode_weights(
                model, MANIFEST, version=version, codec=codec,
                since=since, names=None if since is None else log.since(since),
            )  # fmt: skip
            known = decode_weights(data, MANIFEST, known)
            whole = encode_weights(model, MANIFEST, version=version, codec=codec)
            assert same(known[0], decode_weights(whole, MANIFEST)[0])
