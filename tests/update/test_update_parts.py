"""Tensors that were trained in part: the part travels, and comes back as a part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from codec_bounds import error_bound
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update import CODECS, Manifest, PartialUpdate, decode, encode
from fl_elastic.update.checks import check_update
from fl_elastic.update.manifest import Role
from fl_elastic.update.partial import trained_part
from fl_elastic.update.parts import Masks, part_shape, put_part, take_part

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Masks]:
    """Draw a shape and masks of it, at least one of them not None."""
    shape: tuple[int, ...] = draw(shapes)
    masks: list[NDArray[np.bool_] | None] = [
        np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
        if draw(st.booleans())
        else None
        for n in shape
    ]
    if all(mask is None for mask in masks):
        masks[draw(st.integers(0, len(shape) - 1))] = np.arange(shape[0]) < 0
        masks = [
            None if m is None else np.zeros(n, bool) for m, n in zip(masks, shape, strict=True)
        ]
    return shape, tuple(masks)


def slow_outer(shape: tuple[int, ...], masks: Masks) -> NDArray[np.bool_]:
    """Whether every element is trained, one by one."""
    whole = np.zeros(shape, dtype=bool)
    for index in np.ndindex(*shape):
        whole[index] = all(m is None or m[i] for m, i in zip(masks, index, strict=True))
    return whole


def update_of(
    shape: tuple[int, ...], masks: Masks, seed: int = 0
) -> tuple[Manifest, PartialUpdate]:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    delta = np.where(slow_outer(shape, masks), values, np.float32(0))
    manifest = Manifest(
        ("mean", "whole", "part"),
        ((2,), (3, 5), shape),
        ("float32",) * 3,
        (Role.STATISTIC, Role.PARAMETER, Role.PARAMETER),
    )
    deltas = {"mean": np.ones(2, np.float32), "part": delta, "whole": np.ones((3, 5), np.float32)}
    return manifest, PartialUpdate(deltas, dict.fromkeys(deltas, 3), 9, 4, {"part": masks})


@given(case=parts())
def test_the_trained_elements_are_the_outer_product_of_the_masks(
    case: tuple[tuple[int, ...], Masks],
) -> None:
    shape, masks = case
    _, update = update_of(shape, masks)
    found = trained_part(update, "part")
    assert found is not None and found.dtype == np.bool_ and found.ndim == len(shape)
    assert all(n == 1 for n, mask in zip(found.shape, masks, strict=True) if mask is None)
    assert np.array_equal(np.broadcast_to(found, shape), slow_outer(shape, masks))
    assert trained_part(update, "whole") is None


@given(case=parts(), seed=st.integers(0, 99))
def test_taking_and_putting_a_part_are_inverse(
    case: tuple[tuple[int, ...], Masks], seed: int
) -> None:
    shape, masks = case
    array = np.random.default_rng(seed).standard_normal(shape)
    part = take_part(array, masks)
    assert part.shape == part_shape(masks, shape)
    assert np.array_equal(part.reshape(-1), array[slow_outer(shape, masks)])
    back = put_part(part, masks, shape)
    assert np.array_equal(back, np.where(slow_outer(shape, masks), array, 0))


@pytest.mark.parametrize("codec", CODECS.names())
@given(case=parts(), seed=st.integers(0, 99))
def test_a_part_comes_back_as_a_part(
    codec: str, case: tuple[tuple[int, ...], Masks], seed: int
) -> None:
    shape, masks = case
    manifest, update = update_of(shape, masks, seed)
    back = decode(encode(update, manifest, codec), manifest)
    assert back.steps == update.steps and list(back.parts) == ["part"]
    for mask, seen in zip(masks, back.parts["part"], strict=True):
        assert (mask is None) is (seen is None)
        assert mask is None or seen is None or np.array_equal(mask, seen)
    trained = slow_outer(shape, masks)
    assert not back.deltas["part"][~trained].any()
    written = take_part(update.deltas["part"], masks)
    error = np.abs(back.deltas["part"] - update.deltas["part"]).max(initial=0.0)
    assert error <= error_bound(codec, written) * (1 + 1e-6)
    if codec == "fp32":
        assert np.array_equal(back.deltas["part"], update.deltas["part"])


@given(case=parts(), seed=st.integers(0, 99))
def test_a_change_outside_the_part_is_refused(
    case: tuple[tuple[int, ...], Masks], seed: int
) -> None:
    shape, masks = case
    manifest, update = update_of(shape, masks)
    outside = np.argwhere(~slow_outer(shape, masks))
    if not len(outside):
        return
    place = tuple(outside[seed % len(outside)])
    delta = update.deltas["part"].copy()
    delta[place] = 1e-30
    wrong = replace(update, deltas=update.deltas | {"part": delta})
    for refuse in (check_update, encode):
        with pytest.raises(UpdateError, match="'part' is not zero outside its trained part"):
            refuse(wrong, manifest)


def test_a_quarter_of_both_channels_takes_about_a_sixteenth_of_the_bytes() -> None:
    quarter = np.arange(64) < 16
    manifest, update = update_of((64, 64, 3, 3), (quarter, quarter, None, None))
    assert len(encode(update, manifest)) < 64 * 64 * 9 * 4 / 16 + 600


def test_a_zero_change_of_a_trained_part_stays_trained() -> None:
    mask = np.arange(40) < 20
    manifest, update = update_of((40, 3), (mask, None))
    silent = replace(update, deltas=update.deltas | {"part": np.zeros((40, 3), np.float32)})
    back = decode(encode(silent, manifest), manifest)
    found = trained_part(back, "part")
    assert found is not None and np.array_equal(found[:, 0], mask)
    # Without parts the same zeros are left out, and say nothing about what was trained.
    whole = decode(encode(replace(silent, parts={}), manifest), manifest)
    assert whole.parts == {} and not whole.deltas["part"].any()
