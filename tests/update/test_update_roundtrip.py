"""What is packed comes out again: partial updates and whole models, in every codec."""

from __future__ import annotations

import numpy as np
import pytest
from codec_bounds import error_bound
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from small_models import chain

from fl_elastic.errors import RegistryError, UpdateError
from fl_elastic.testing import Check, codec_checks, name_of
from fl_elastic.update import CODECS, Manifest, PartialUpdate, decode, encode, weights_of
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_wire import decode_weights, encode_weights

NAMES = ["bf16", "fp16", "fp32", "int8", "topk"]
FOR_WEIGHTS = ["bf16", "fp16", "fp32"]
every_codec = pytest.mark.parametrize("codec", NAMES)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
# Half precision keeps 11 significant bits, and steps of 2^-24 near zero.
HALF = 2.0**-11
SMALLEST = 2.0**-25


def test_the_registered_codecs_are_all_checked() -> None:
    assert CODECS.names() == NAMES
    assert len({name_of(check) for check in codec_checks()}) == len(codec_checks()) == 12
    with pytest.raises(RegistryError, match="did you mean 'fp32'"):
        encode(PartialUpdate({}, {}, 1), Manifest.of(chain()), codec="fp33")


@pytest.mark.parametrize("check", codec_checks(), ids=name_of)
@every_codec
def test_codec_conforms(codec: str, check: Check) -> None:
    made = CODECS.make(codec)
    check(made)
    check(type(made))
    assert isinstance(made, type(CODECS.make(codec)))


@st.composite
def updates(draw: st.DrawFn) -> tuple[Manifest, PartialUpdate]:
    """Draw a manifest with tensors of any shape and role, and deltas of some of them."""
    all_shapes = draw(st.lists(shapes, max_size=6))
    names = tuple(f"t{index}" for index in range(len(all_shapes)))
    roles = tuple(draw(st.sampled_from(list(Role))) for _ in names)
    dtypes = tuple("int64" if role is Role.COUNTER else "float32" for role in roles)
    manifest = Manifest(names, tuple(all_shapes), dtypes, roles)
    values = st.floats(-60_000, 60_000, width=32)
    trained = [
        name
        for name, role in zip(names, roles, strict=True)
        if role is not Role.COUNTER and draw(st.booleans())
    ]
    # In any order: the wire has its own.
    trained = draw(st.permutations(trained))
    deltas = {
        name: draw(hnp.arrays(np.float32, manifest.shape(name), elements=values))
        for name in trained
    }
    steps = {name: draw(st.integers(1, 1_000_000)) for name in trained}
    examples = draw(st.integers(1, 100_000_000))
    return manifest, PartialUpdate(deltas, steps, examples, draw(st.integers(0, 2**62)))


@every_codec
@given(case=updates())
def test_an_update_comes_back_within_the_codecs_own_bound(
    codec: str, case: tuple[Manifest, PartialUpdate]
) -> None:
    manifest, update = case
    made = CODECS.make(codec)
    data = encode(update, manifest, codec)
    assert encode(update, manifest, codec) == data
    back = decode(data, manifest)
    assert set(back.deltas) == set(update.deltas) and back.parts == {}
    assert (back.steps, back.num_examples) == (update.steps, update.num_examples)
    assert back.base_version == update.base_version
    for name, delta in update.deltas.items():
        assert (back.deltas[name].dtype, back.deltas[name].shape) == (np.float32, delta.shape)
        error = np.abs(back.deltas[name].astype(np.float64) - delta)
        exact = manifest.role(name) is Role.STATISTIC and not made.for_statistics
        # Slices of zeros that are left out leave no other share, scale or mean that is further off.
        bound = 0.0 if exact or codec == "fp32" else error_bound(codec, delta)
        assert error.max(initial=0.0) <= bound
        assert codec != "fp16" or (error <= HALF * np.abs(delta) + SMALLEST).all()


@given(case=updates())
def test_the_buffer_may_be_a_view_and_is_left_alone(case: tuple[Manifest, PartialUpdate]) -> None:
    manifest, update = case
    data = bytearray(encode(update, manifest))
    before = bytes(data)
    back = decode(memoryview(data), manifest)
    for delta in back.deltas.values():
        delta += 1
    assert bytes(data) == before


def test_bytes_do_not_depend_on_the_order_of_the_deltas() -> None:
    manifest = Manifest.of(chain())
    weights = weights_of(chain(), manifest)
    steps = dict.fromkeys(weights, 2)
    forward = PartialUpdate(weights, steps, 5)
    turned = PartialUpdate(dict(reversed(weights.items())), dict(reversed(steps.items())), 5)
    assert encode(forward, manifest) == encode(turned, manifest)


def test_other_layouts_and_dtypes_of_deltas_are_written_as_their_numbers() -> None:
    manifest = Manifest(("w",), ((3, 4),), ("float64",), (Role.PARAMETER,))
    values = np.arange(12, dtype=np.float64).reshape(4, 3).T
    for delta in (values, values.astype(">f4"), values.astype(np.float16), values.astype(int)):
        back = decode(encode(PartialUpdate({"w": delta}, {"w": 1}, 1), manifest), manifest)
        assert np.array_equal(back.deltas["w"], values)


@pytest.mark.parametrize("value", [65_520.0, -65_520.0, 1e9])
def test_what_overflows_half_precision_is_refused(value: float) -> None:
    manifest = Manifest(("w",), ((2,),), ("float32",), (Role.PARAMETER,))
    update = PartialUpdate({"w": np.array([0.0, value], np.float32)}, {"w": 1}, 1)
    with pytest.raises(UpdateError, match="do not fit float16"):
        encode(update, manifest, codec="fp16")
    assert decode(encode(update, manifest), manifest).deltas["w"][1] == np.float32(value)


@st.composite
def models(draw: st.DrawFn) -> tuple[Manifest, dict[str, NDArray[np.generic]]]:
    """Draw a whole model with tensors of every dtype."""
    kinds = ["float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32"]
    dtypes = draw(st.lists(st.sampled_from([*kinds, "int64"]), max_size=6))
    names = tuple(f"t{index}" for index in range(len(dtypes)))
    all_shapes = tuple(draw(shapes) for _ in names)
    roles = tuple(
        draw(st.sampled_from([Role.PARAMETER, Role.STATISTIC]))
        if "float" in dtype
        else Role.COUNTER
        for dtype in dtypes
    )
    manifest = Manifest(names, all_shapes, tuple(dtypes), roles)
    weights: dict[str, NDArray[np.generic]] = {}
    for name in names:
        dtype = manifest.array_dtype(name)
        elements = st.floats(-60_000, 60_000, width=16) if dtype.kind == "f" else None
        weights[name] = draw(hnp.arrays(dtype, manifest.shape(name), elements=elements))
    return manifest, weights


@pytest.mark.parametrize("codec", FOR_WEIGHTS)
@given(case=models(), version=st.integers(0, 2**62))
def test_a_model_comes_back_with_its_integers_exact(
    codec: str, case: tuple[Manifest, dict[str, NDArray[np.generic]]], version: int
) -> None:
    manifest, weights = case
    data = encode_weights(weights, manifest, version=version, codec=codec)
    back, seen = decode_weights(data, manifest)
    assert seen == version and list(back) == list(manifest.names)
    for name, array in weights.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        if codec != "bf16" or array.dtype.kind != "f":
            assert np.array_equal(back[name], array)
        else:
            error = np.abs(back[name].astype(np.float64) - array.astype(np.float64))
            assert (error <= 2.0**-8 * np.abs(array.astype(np.float64)) + SMALLEST).all()


@pytest.mark.parametrize("codec", sorted(set(NAMES) - set(FOR_WEIGHTS)))
def test_a_whole_model_is_not_written_by_what_is_for_changes(codec: str) -> None:
    manifest = Manifest.of(chain())
    weights = weights_of(chain(), manifest)
    with pytest.raises(UpdateError, match=f"'{codec}' is for changes.* use bf16, fp16, fp32"):
        encode_weights(weights, manifest, codec=codec)


def test_models_that_do_not_fit_are_refused() -> None:
    manifest = Manifest.of(chain())
    weights = weights_of(chain(), manifest)
    with pytest.raises(UpdateError, match="missing"):
        encode_weights({}, manifest)
    with pytest.raises(UpdateError, match="do not fit float16"):
        encode_weights(weights | {"0.bias": np.full(12, 1e6, np.float32)}, manifest, codec="fp16")
    with pytest.raises(UpdateError, match="do not fit float32"):
        encode_weights(weights | {"0.bias": np.full(12, np.nan, np.float32)}, manifest)


def test_an_update_is_no_model_and_a_model_no_update() -> None:
    manifest = Manifest.of(chain())
    weights = weights_of(chain(), manifest)
    with pytest.raises(UpdateError, match="kind"):
        decode(encode_weights(weights, manifest), manifest)
    with pytest.raises(UpdateError, match="kind"):
        decode_weights(encode(PartialUpdate({}, {}, 1), manifest), manifest)
