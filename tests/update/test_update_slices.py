"""Channels that were not trained do not travel, and come back as zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import UpdateError
from fl_elastic.update import Manifest, PartialUpdate, Role, decode, encode
from fl_elastic.update.slices import Slices

SHAPES = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)


def manifest_of(*shapes: tuple[int, ...]) -> Manifest:
    names = tuple(f"t{index}" for index in range(len(shapes)))
    return Manifest(names, shapes, ("float32",) * len(shapes), (Role.PARAMETER,) * len(shapes))


@given(
    shape=SHAPES,
    axis=st.integers(0, 1),
    seed=st.integers(0, 999),
    codec=st.sampled_from(["fp32", "fp16"]),
)
def test_what_is_left_out_comes_back_as_zeros(
    shape: tuple[int, ...], axis: int, seed: int, codec: str
) -> None:
    generator = np.random.default_rng(seed)
    delta = generator.normal(size=shape).astype(np.float16).astype(np.float32)
    silent = generator.random(shape[axis]) < 0.5
    delta[(slice(None),) * axis + (silent,)] = 0
    manifest = manifest_of(shape, (3,))
    update = PartialUpdate({"t0": delta, "t1": np.ones(3, np.float32)}, {"t0": 2, "t1": 2}, 5)
    found = decode(encode(update, manifest, codec), manifest)
    assert np.array_equal(found.deltas["t0"], delta) and found.steps == update.steps


def test_a_quarter_of_the_channels_takes_about_a_quarter_of_the_bytes() -> None:
    manifest = manifest_of((64, 64, 3, 3))
    delta = np.zeros((64, 64, 3, 3), np.float32)
    delta[:, 8:24] = 1.0
    data = encode(PartialUpdate({"t0": delta}, {"t0": 1}, 1), manifest)
    assert len(data) < delta.nbytes / 4 + 400


def test_dense_deltas_and_vectors_are_written_whole() -> None:
    assert Slices.of(np.ones((4, 4))) is None
    assert Slices.of(np.zeros((3, 3))) is None
    assert Slices.of(np.zeros(4)) is None
    assert Slices.of(np.float32(0).reshape(())) is None


@pytest.mark.parametrize(
    "value",
    [[2, "80"], [0, "zz"], [0, "8000"], [0], "0", [True, "80"], [-1, "80"], [0, None], {"axis": 0}],
)
def test_nonsense_about_slices_is_refused(value: Any) -> None:
    with pytest.raises(UpdateError):
        Slices.from_header(value, (4, 3))
    with pytest.raises(UpdateError):
        Slices.from_header([0, "80"], (4,))
