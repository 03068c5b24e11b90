"""Channels that were not trained do not travel, and come back as zeros."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import UpdateError
from fl_elastic.update import Manifest, PartialUpdate, decode, encode
from fl_elastic.update.manifest import Role
from fl_elastic.update.parts import Slices

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def manifest_of(*shapes: tuple[int, ...]) -> Manifest:
    names = tuple(f"t{index}" for index in range(len(shapes)))
    return Manifest(names, shapes, ("float32",) * len(shapes), (Role.PARAMETER,) * len(shapes))


@given(
    shape=SHAPES,
    axis=st.integers(0, 3),
    seed=st.integers(0, 999),
    codec=st.sampled_from(["fp32", "fp16"]),
)
def test_what_is_left_out_comes_back_as_zeros(
    shape: tuple[int, ...], axis: int, seed: int, codec: str
) -> None:
    axis = axis % len(shape)
    generator = np.random.default_rng(seed)
    delta = generator.normal(size=shape).astype(np.float16).astype(np.float32)
    silent = generator.random(shape[axis]) < 0.5
    delta[(slice(None),) * axis + (silent,)] = 0
    manifest = manifest_of(shape, (3,))
    update = PartialUpdate({"t0": delta, "t1": np.ones(3, np.float32)}, {"t0": 2, "t1": 2}, 5)
    found = decode(encode(update, manifest, codec), manifest)
    assert np.array_equal(found.deltas["t0"], delta) and found.steps == update.steps
    assert found.parts == {}


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_the_axis_that_leaves_out_most_is_chosen(axis: int) -> None:
    delta = np.ones((8, 9, 7, 6))
    delta[:, 4] = 0
    delta[(slice(None),) * axis + (slice(2, None),)] = 0
    found = Slices.of(delta)
    assert found is not None and not found.trained
    assert [mask is not None for mask in found.masks] == [a == axis for a in range(4)]
    assert np.array_equal(found.put(found.take(delta), delta.shape), delta)


def test_dense_and_small_deltas_are_written_whole() -> None:
    assert Slices.of(np.ones((4, 4))) is None
    assert Slices.of(np.zeros((3, 3))) is None
    assert Slices.of(np.zeros(4)) is None
    assert Slices.of(np.zeros(())) is None


NONSENSE: list[Any] = [
    "nonzero",
    {"axis": 0},
    [],
    ["nonzero"],
    ["trained"],
    ["other", [0, "80"]],
    [[], [0, "80"]],
    [0, "80"],
    ["nonzero", 0, "80"],
    ["nonzero", [2, "80"]],
    ["nonzero", [-1, "80"]],
    ["nonzero", [True, "80"]],
    ["nonzero", [0.0, "80"]],
    ["nonzero", [0, "zz"]],
    ["nonzero", [0, "\uff18\uff10"]],
    ["nonzero", [0, " 8"]],
    ["nonzero", [0, "8000"]],
    ["nonzero", [0, ""]],
    ["nonzero", [0, None]],
    ["nonzero", [0, 80]],
    ["nonzero", [0]],
    ["nonzero", [0, "80", 1]],
    ["nonzero", [0, "88"]],
    ["nonzero", [0, "80"], [1, "80"]],
    ["trained", [1, "80"], [0, "80"]],
    ["trained", [0, "80"], [0, "80"]],
    ["trained", [0, "80"], None],
]


@pytest.mark.parametrize("value", NONSENSE, ids=str)
def test_nonsense_about_slices_is_refused(value: Any) -> None:
    with pytest.raises(UpdateError) as caught:
        Slices.from_header(value, (4, 3))
    assert "\n" not in str(caught.value)


def test_tensors_without_axes_have_no_slices() -> None:
    with pytest.raises(UpdateError, match="next axis"):
        Slices.from_header(["nonzero", [0, "80"]], ())


@pytest.mark.parametrize("trained", [True, False])
def test_what_the_header_says_is_read_back(trained: bool) -> None:
    masks = (None, np.array([True, False, True]), np.arange(9) > 3 if trained else None)
    value = Slices(masks, trained).to_header()
    found = Slices.from_header(json.loads(json.dumps(value)), (5, 3, 9))
    assert found is not None and found.trained is trained
    for mask, back in zip(masks, found.masks, strict=True):
        assert (mask is None) is (back is None)
        assert mask is None or back is None or np.array_equal(mask, back)
