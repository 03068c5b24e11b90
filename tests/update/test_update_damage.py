"""Damaged bytes and lying headers: an UpdateError each, never anything else."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from damage import assert_damage_is_noticed
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_elastic.errors import StaleModelError, UpdateError
from fl_elastic.update import CODECS, Manifest, PartialUpdate, decode, encode
from fl_elastic.update.checks import Limits
from fl_elastic.update.frame import CHECKSUM_BYTES, WIRE_VERSION, checksum
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_wire import decode_weights, encode_weights

MANIFEST = Manifest(
    ("conv", "bias", "mean", "count"),
    ((2, 3), (3,), (3,), ()),
    ("float32", "float16", "float32", "int64"),
    (Role.PARAMETER, Role.PARAMETER, Role.STATISTIC, Role.COUNTER),
)
UPDATE = PartialUpdate(
    {"conv": np.ones((2, 3), np.float32), "mean": np.zeros(3, np.float32)},
    {"conv": 3, "mean": 4},
    num_examples=10,
    base_version=7,
)
PARTLY = PartialUpdate(
    {"conv": np.array([[0, 1, 2], [0, 0, 0]], np.float32), "mean": np.ones(3, np.float32)},
    {"conv": 3, "mean": 4},
    num_examples=10,
    base_version=7,
    parts={"conv": (np.array([True, False]), np.array([False, True, True]))},
)
WEIGHTS: dict[str, np.ndarray[tuple[int, ...], np.dtype[Any]]] = {
    "conv": np.ones((2, 3), np.float32),
    "bias": np.ones(3, np.float16),
    "mean": np.zeros(3, np.float32),
    "count": np.array(5),
}
START = struct.Struct("<4sHBBI")
BEFORE_TEXT = START.size + CHECKSUM_BYTES


def pack(
    header: Any, payload: bytes, *, kind: int = 1, version: int = WIRE_VERSION, zero: int = 0
) -> bytes:
    """Pack by the documented layout, with a checksum that fits whatever the content says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = START.pack(b"FLEL", version, kind, zero, len(text))
    return start + checksum(start + text, payload) + text + payload


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(text_of(data))
    return header


def text_of(data: bytes) -> bytes:
    return data[BEFORE_TEXT : BEFORE_TEXT + START.unpack(data[: START.size])[4]]


def as_written(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


GOOD = encode(UPDATE, MANIFEST)
HEADER = header_of(GOOD)
PAYLOAD = GOOD[-36:]


def refused(data: bytes, limits: Limits | None = None) -> str:
    with pytest.raises(UpdateError) as caught:
        decode(data, MANIFEST, limits)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_documented_layout_is_the_real_one() -> None:
    assert pack(as_written(HEADER), PAYLOAD) == GOOD
    back = decode(pack(HEADER, PAYLOAD), MANIFEST)
    assert back.steps == UPDATE.steps and back.base_version == 7
    assert HEADER == {
        "manifest": MANIFEST.hash,
        "codec": "fp32",
        "indices": [0, 2],
        "steps": [3, 4],
        "num_examples": 10,
        "base_version": 7,
    }


@pytest.mark.parametrize("codec", CODECS.names())
@pytest.mark.parametrize("update", [UPDATE, PARTLY], ids=["whole", "partly"])
def test_all_damage_to_an_update_is_noticed(codec: str, update: PartialUpdate) -> None:
    good = encode(update, MANIFEST, codec=codec)
    assert_damage_is_noticed(good, lambda data: decode(data, MANIFEST))


def test_the_documented_layout_of_parts_is_the_real_one() -> None:
    data = encode(PARTLY, MANIFEST, codec="int8")
    header = header_of(data)
    assert header["slices"] == [["trained", [0, "80"], [1, "60"]], None]
    assert header["exact"] == [2]
    payload = data[-(4 + 2 + 12) :]
    assert pack(as_written(header), payload) == data
    assert np.frombuffer(payload[:4], "<f4")[0] == pytest.approx(2 / 127, rel=1e-6)
    assert payload[6:] == np.ones(3, "<f4").tobytes()


def test_all_damage_to_a_model_is_noticed() -> None:
    good = encode_weights(WEIGHTS, MANIFEST, version=3)
    assert_damage_is_noticed(good, lambda data: decode_weights(data, MANIFEST))


@pytest.mark.parametrize("kind", ["update", "weights"])
def test_every_addition_is_noticed(kind: str) -> None:
    good = GOOD if kind == "update" else encode_weights(WEIGHTS, MANIFEST)
    for more in (b"\0", b" ", good):
        with pytest.raises(UpdateError):
            (decode if kind == "update" else decode_weights)(good + more, MANIFEST)


def test_other_formats_are_told_apart() -> None:
    assert f"version {WIRE_VERSION + 1}" in refused(pack(HEADER, PAYLOAD, version=WIRE_VERSION + 1))
    assert "kind 9" in refused(pack(HEADER, PAYLOAD, kind=9))
    assert "mark" in refused(b"PK\x03\x04" + GOOD[4:])
    assert "too short" in refused(b"")
    assert "too short" in refused(GOOD[: BEFORE_TEXT - 1])


def test_a_message_of_another_model_names_both_manifests() -> None:
    message = refused(pack(HEADER | {"manifest": "0123456789abcdef"}, PAYLOAD))
    assert "0123456789abcdef" in message and MANIFEST.hash in message


LIES: dict[str, dict[str, Any]] = {
    "manifest is a number": {"manifest": 5},
    "manifest is long": {"manifest": "f" * 100_000},
    "manifest is null": {"manifest": None},
    "indices repeat": {"indices": [0, 0]},
    "indices decrease": {"indices": [2, 0]},
    "an index is too large": {"indices": [0, 4]},
    "an index is huge": {"indices": [0, 10**30]},
    "an index is negative": {"indices": [-1, 2]},
    "an index is a counter's": {"indices": [0, 3]},
    "an index is a fraction": {"indices": [0, 2.0]},
    "an index is true": {"indices": [False, 2]},
    "an index is a word": {"indices": ["0", 2]},
    "indices are a number": {"indices": 2},
    "indices are null": {"indices": None},
    "an index is missing": {"indices": [0]},
    "an index is too many": {"indices": [0, 1, 2]},
    "steps are fewer": {"steps": [3]},
    "steps are more": {"steps": [3, 4, 5]},
    "a step count is zero": {"steps": [0, 4]},
    "a step count is negative": {"steps": [-3, 4]},
    "a step count is a fraction": {"steps": [3.0, 4]},
    "a step count is true": {"steps": [True, 4]},
    "a step count is huge": {"steps": [10**300, 4]},
    "a step count is above the limit": {"steps": [1_000_001, 4]},
    "a step count is NaN": {"steps": [float("nan"), 4]},
    "steps are a dict": {"steps": {"0": 3}},
    "no examples": {"num_examples": 0},
    "negative examples": {"num_examples": -10},
    "examples are a fraction": {"num_examples": 10.0},
    "examples are true": {"num_examples": True},
    "examples are huge": {"num_examples": 10**18},
    "examples are infinite": {"num_examples": float("inf")},
    "examples are a word": {"num_examples": "10"},
    "version is negative": {"base_version": -1},
    "version is a fraction": {"base_version": 7.5},
    "version is true": {"base_version": True},
    "version is huge": {"base_version": 2**63},
    "version is null": {"base_version": None},
    "codec is unknown": {"codec": "fp8"},
    "codec is a list": {"codec": ["fp32"]},
    "codec is long": {"codec": "fp32" * 10_000},
    "codec is half": {"codec": "fp16"},
    "codec takes other bytes": {"codec": "topk"},
    "slices are a word": {"slices": "nonzero"},
    "slices are null": {"slices": None},
    "slices are fewer": {"slices": [None]},
    "slices are more": {"slices": [None, None, None]},
    "slices make it smaller": {"slices": [["nonzero", [1, "80"]], None]},
    "slices of another axis": {"slices": [["nonzero", [2, "80"]], None]},
    "slices of no kind": {"slices": [["other", [0, "c0"]], None]},
    "a mask is long": {"slices": [["trained", [0, "f" * 100_000]], None]},
    "a mask has bits beyond": {"slices": [["trained", [0, "e0"]], None]},
    "a part is no part": {"slices": [["trained"], None]},
    "an index of huge size": {"slices": [["trained", [10**300, "80"]], None]},
    "exact is a number": {"exact": 2},
    "exact is null": {"exact": None},
    "exact is not in the update": {"exact": [1]},
    "exact is outside": {"exact": [7]},
    "exact repeats": {"exact": [2, 2]},
    "exact is true": {"exact": [True]},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused(lie: str) -> None:
    message = refused(pack(HEADER | LIES[lie], PAYLOAD))
    assert len(message) < 1000


@pytest.mark.parametrize("field", sorted(HEADER))
def test_a_missing_field_is_refused(field: str) -> None:
    header = {name: value for name, value in HEADER.items() if name != field}
    assert refused(pack(header, PAYLOAD))


@pytest.mark.parametrize("indices", [[2, 2], [2, 1], [1, 1]])
def test_repeated_or_falling_indices_are_refused_though_the_payload_fits(
    indices: list[int],
) -> None:
    header = HEADER | {"indices": indices, "steps": [1, 1]}
    assert "increasing" in refused(pack(header, b"\0" * 24))


@pytest.mark.parametrize("length", [0, 1, 35, 37, 36 * 1000])
def test_a_payload_of_another_length_is_refused(length: int) -> None:
    assert f"payload has {length} bytes" in refused(pack(HEADER, b"\0" * length))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e31, -3e38])
def test_a_payload_of_impossible_numbers_is_refused(value: float) -> None:
    numbers = np.zeros(9, np.float32)
    numbers[4] = value
    assert "'conv'" in refused(pack(HEADER, numbers.tobytes()))


def test_a_change_beyond_the_tensors_own_range_is_refused() -> None:
    header = HEADER | {"indices": [1], "steps": [1]}
    assert decode(pack(header, np.full(3, 1e4, "<f4").tobytes()), MANIFEST).deltas["bias"][0] == 1e4
    assert "'bias' reaches" in refused(pack(header, np.full(3, 3e4, "<f4").tobytes()))


def test_limits_are_the_servers_own() -> None:
    refused(GOOD, Limits(max_steps=3))
    refused(GOOD, Limits(max_examples=9))
    refused(GOOD, Limits(max_change=0.5))
    assert decode(GOOD, MANIFEST, Limits(4, 10, 1.0)).num_examples == 10


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"3",
        b"null",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        b"NaN",
        b'{"a":1}x',
    ],
    ids=[
        "nothing",
        "list",
        "number",
        "null",
        "word",
        "brace",
        "no text",
        "empty",
        "deep",
        "NaN",
        "tail",
    ],
)
def test_a_header_that_is_no_json_object_is_refused(text: bytes) -> None:
    assert refused(pack(text, PAYLOAD))


DEPTHS = (3, 500, *range(900, 1010, 3), 5_000)


@pytest.mark.parametrize("field", [*sorted(HEADER), "slices", "exact"])
def test_nested_values_are_refused_at_every_depth(field: str) -> None:
    for depth in DEPTHS:
        text = json.dumps(HEADER | {field: "@"}).replace('"@"', "[" * depth + "]" * depth)
        assert refused(pack(text.encode(), PAYLOAD))


def test_a_header_is_not_read_where_it_is_longer_than_any_of_this_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fl_elastic.update import frame

    read: list[int] = []
    monkeypatch.setattr(frame, "_json_object", lambda text: read.append(len(text)) or {})
    huge = b"[" + b"{}," * 10_000_000 + b"{}]"
    assert "header of" in refused(pack(huge, b""))
    with pytest.raises(UpdateError, match="header of"):
        decode_weights(pack(huge, b"", kind=2), MANIFEST)
    assert read == []


@pytest.mark.parametrize("axes", [(1,), (9, 9), (64, 3, 3, 3), (5000, 40)])
@pytest.mark.parametrize("count", [1, 200])
def test_every_honest_header_is_read(axes: tuple[int, ...], count: int) -> None:
    """The longest there is: a mask along every axis, the largest counts, every tensor exact."""
    names = tuple(f"block.{i}.weight" for i in range(count if axes != (5000, 40) else 3))
    manifest = Manifest(
        names, (axes,) * len(names), ("float32",) * len(names), (Role.PARAMETER,) * len(names)
    )
    rng = np.random.default_rng(0)
    masks = tuple(rng.random(size) < 0.5 for size in axes)
    if all(mask.all() for mask in masks) or not all(mask.any() for mask in masks):
        masks = tuple(np.arange(size) < max(size // 2, 1) for size in axes)
    delta = np.ones(axes, np.float32)
    for axis, mask in enumerate(masks):
        delta = delta * mask.reshape([-1 if a == axis else 1 for a in range(len(axes))])
    whole = axes == (1,)
    update = PartialUpdate(
        dict.fromkeys(names, delta), dict.fromkeys(names, 1_000_000), 100_000_000, 2**62,
        {} if whole else dict.fromkeys(names, masks),
    )  # fmt: skip
    for codec in CODECS.names():
        assert decode(encode(update, manifest, codec), manifest).steps == update.steps


def test_numbers_of_many_digits_are_refused() -> None:
    text = json.dumps(HEADER | {"num_examples": "@"}).replace('"@"', "9" * 100_000)
    assert refused(pack(text.encode(), PAYLOAD))
    text = json.dumps(HEADER | {"steps": ["@", 4]}).replace('"@"', "9" * 4_000)
    assert len(refused(pack(text.encode(), PAYLOAD))) < 1000


@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert refused(data)
    with pytest.raises(UpdateError):
        decode_weights(data, MANIFEST)


@pytest.mark.parametrize(
    "around", ["[@, null]", '[["trained", @], null]', '[["trained", [0, @]], null]']
)
def test_nested_slices_are_refused_at_every_depth(around: str) -> None:
    text = json.dumps(HEADER | {"slices": "?"}).replace('"?"', around)
    for depth in DEPTHS:
        assert refused(pack(text.replace("@", "[" * depth + "]" * depth).encode(), PAYLOAD))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


masks = st.lists(
    st.tuples(st.integers(-1, 2), st.sampled_from(["", "00", "80", "c0", "e0", "ff", "0000", "x"])),
    max_size=3,
)
slices = st.none() | st.builds(
    lambda kind, each: [kind, *map(list, each)], st.sampled_from(["trained", "nonzero"]), masks
)


@settings(max_examples=300)
@given(
    codec=st.sampled_from(CODECS.names()),
    given_slices=st.lists(slices, min_size=2, max_size=2),
    exact=st.none() | st.lists(st.integers(0, 3), max_size=2),
    payload=st.binary(max_size=40) | st.integers(0, 40).map(bytes),
)
def test_random_parts_are_an_update_or_refused(
    codec: str, given_slices: list[Any], exact: list[int] | None, payload: bytes
) -> None:
    header = HEADER | {"codec": codec, "slices": given_slices}
    if exact is not None:
        header["exact"] = exact
    try:
        update = decode(pack(header, payload), MANIFEST)
    except UpdateError as error:
        assert "\n" not in str(error)
    else:
        again = decode(encode(update, MANIFEST), MANIFEST)
        assert set(again.parts) == set(update.parts)
        assert all(np.array_equal(again.deltas[n], update.deltas[n]) for n in update.deltas)


@pytest.mark.slow
@settings(max_examples=400)
@given(
    changes=st.dictionaries(
        st.sampled_from([*sorted(HEADER), "slices", "exact"]), json_values, min_size=1
    ),
    payload=st.binary(max_size=40) | st.just(PAYLOAD),
    text=st.none() | st.binary(max_size=60),
)
def test_random_headers_are_an_update_or_refused(
    changes: dict[str, Any], payload: bytes, text: bytes | None
) -> None:
    data = pack(HEADER | changes if text is None else text, payload)
    try:
        update = decode(data, MANIFEST)
    except UpdateError as error:
        assert "\n" not in str(error)
    else:
        assert all(np.isfinite(delta).all() for delta in update.deltas.values())
        assert all(isinstance(count, int) and count > 0 for count in update.steps.values())


KNOWN = (WEIGHTS, 3)
CHANGED = encode_weights(WEIGHTS, MANIFEST, version=5, since=3, names={"conv", "count"})


def test_the_documented_layout_of_changed_tensors_is_the_real_one() -> None:
    header = header_of(CHANGED)
    whole = encode_weights(WEIGHTS, MANIFEST, version=5)
    payload = whole[BEFORE_TEXT + len(text_of(whole)) :]
    assert header == {
        "manifest": MANIFEST.hash,
        "codec": "fp32",
        "version": 5,
        "since": 3,
        "indices": [0, 3],
        "model": zlib.crc32(payload),
    }
    assert CHANGED == pack(as_written(header), payload[:24] + payload[-8:], kind=3)


def test_all_damage_to_changed_tensors_is_noticed() -> None:
    assert decode_weights(CHANGED, MANIFEST, KNOWN)[1] == 5
    assert_damage_is_noticed(CHANGED, lambda data: decode_weights(data, MANIFEST, KNOWN))


LIES_OF_CHANGES: dict[str, dict[str, Any]] = {
    "since is missing": {"since": None},
    "since is after the version": {"since": 6},
    "since is negative": {"since": -1},
    "since is true": {"since": True},
    "since is a fraction": {"since": 3.0},
    "since is huge": {"since": 10**300},
    "version is before": {"version": 2},
    "version is null": {"version": None},
    "model is missing": {"model": None},
    "model is true": {"model": True},
    "model is another": {"model": 7},
    "model is negative": {"model": -(10**300)},
    "indices are fewer": {"indices": [0]},
    "indices are more": {"indices": [0, 2, 3]},
    "indices are others": {"indices": [0, 2]},
    "indices fall": {"indices": [3, 0]},
    "an index is outside": {"indices": [0, 4]},
    "an index is negative": {"indices": [-1, 3]},
    "codec is for changes": {"codec": "topk"},
    "codec is half": {"codec": "fp16"},
    "codec is unknown": {"codec": "zip"},
}


@pytest.mark.parametrize("lie", LIES_OF_CHANGES)
def test_lies_about_changed_tensors_are_refused(lie: str) -> None:
    header = header_of(CHANGED) | LIES_OF_CHANGES[lie]
    with pytest.raises(UpdateError) as caught:
        decode_weights(pack(header, CHANGED[-32:], kind=3), MANIFEST, KNOWN)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert isinstance(caught.value, StaleModelError) is (
        lie == "model is another" or lie == "model is negative"
    )


@pytest.mark.slow
@settings(max_examples=300)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(header_of(CHANGED))), json_values, min_size=1),
    payload=st.binary(max_size=40) | st.just(CHANGED[-32:]),
    known=st.sampled_from([None, KNOWN, (WEIGHTS, 4), ({}, 3)]),
)
def test_random_changes_are_refused(changes: dict[str, Any], payload: bytes, known: Any) -> None:
    header = header_of(CHANGED) | changes
    try:
        weights, seen = decode_weights(pack(header, payload, kind=3), MANIFEST, known)
    except UpdateError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(seen, int) and list(weights) == list(MANIFEST.names)


@given(version=json_values, codec=json_values | st.just("fp32"), payload=st.binary(max_size=80))
def test_random_models_are_refused(version: Any, codec: Any, payload: bytes) -> None:
    header = {"manifest": MANIFEST.hash, "codec": codec, "version": version}
    data = pack(header, payload, kind=2)
    try:
        weights, seen = decode_weights(data, MANIFEST)
    except UpdateError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(seen, int) and list(weights) == list(MANIFEST.names)


@pytest.mark.parametrize("version", [-1, 1.5, True, "3", None, 2**70])
def test_a_model_with_an_impossible_version_is_refused(version: Any) -> None:
    good = encode_weights(WEIGHTS, MANIFEST)
    header = header_of(good) | {"version": version}
    with pytest.raises(UpdateError, match="version"):
        decode_weights(pack(header, good[BEFORE_TEXT + len(text_of(good)) :], kind=2), MANIFEST)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_of_impossible_numbers_is_refused(value: float) -> None:
    good = encode_weights(WEIGHTS, MANIFEST)
    payload = bytearray(good[BEFORE_TEXT + len(text_of(good)) :])
    payload[:4] = np.array([value], "<f4").tobytes()
    with pytest.raises(UpdateError, match="conv"):
        decode_weights(pack(header_of(good), bytes(payload), kind=2), MANIFEST)
