"""Batches: everything once per iteration, in an order that depends on seed and iteration only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.data.resized import ResizedImages


def _batches(examples: int, batch_size: int, seed: int = 0) -> Batches:
    x = np.arange(examples, dtype=np.float32)[:, None] * 10
    return Batches(x, np.arange(examples), batch_size, seed=seed)


def _targets(batches: Batches) -> list[list[int]]:
    return [targets.tolist() for _, targets in batches]


@given(examples=st.integers(1, 60), batch_size=st.integers(1, 20), seed=st.integers(0, 9))
def test_each_iteration_gives_every_example_once(examples: int, batch_size: int, seed: int) -> None:
    batches = _batches(examples, batch_size, seed)
    for _ in range(2):
        seen = _targets(batches)
        assert sorted(target for batch in seen for target in batch) == list(range(examples))
        assert len(seen) == len(batches)


@given(examples=st.integers(2, 60), batch_size=st.integers(2, 20))
def test_no_batch_has_a_single_example(examples: int, batch_size: int) -> None:
    sizes = [len(batch) for batch in _targets(_batches(examples, batch_size))]
    assert min(sizes) >= 2
    assert max(sizes) <= batch_size + 1
    assert all(size == batch_size for size in sizes[:-1])


def test_the_order_changes_with_iteration_and_seed_and_is_repeatable() -> None:
    first, second = _batches(50, 8), _batches(50, 8)
    one, two = _targets(first), _targets(first)
    assert one != two
    assert [_targets(second), _targets(second)] == [one, two]
    assert _targets(_batches(50, 8, seed=1)) != one


def test_iterators_that_are_alive_together_do_not_disturb_each_other() -> None:
    expected = _batches(20, 4)
    one, two = _targets(expected), _targets(expected)
    batches = _batches(20, 4)
    left, right = iter(batches), iter(batches)
    pairs = [(a[1].tolist(), b[1].tolist()) for a, b in zip(left, right, strict=True)]
    assert ([a for a, _ in pairs], [b for _, b in pairs]) == (one, two)


def test_global_random_states_are_left_alone() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    _targets(_batches(20, 4))
    assert (torch.rand(1).item(), np.random.rand()) == expected


def test_tensors_are_taken_as_they_are() -> None:
    x, y = torch.ones(6, 2), torch.zeros(6, dtype=torch.int64)
    batches = Batches(x, y, 4, seed=0)
    assert batches.dataset_size == 6
    assert next(iter(batches))[0].shape == (4, 2)


@pytest.mark.parametrize(
    ("inputs", "targets", "batch_size", "message"),
    [
        (3, 2, 1, "3 inputs do not fit 2 targets"),
        (0, 0, 1, "no example"),
        (3, 3, 0, "batch size 0 is below 1"),
    ],
)
def test_impossible_batches_are_refused(
    inputs: int, targets: int, batch_size: int, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        Batches(np.zeros((inputs, 1)), np.zeros(targets), batch_size, seed=0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_images_are_resized_batch_by_batch_to_what_all_together_would_be(shuffle: bool) -> None:
    images = np.random.default_rng(0).normal(size=(7, 3, 5, 5)).astype(np.float32)
    resized = ResizedImages(images, 9)
    batches, expected = (
        Batches(inputs, np.arange(7), 1, seed=3, shuffle=shuffle)
        for inputs in (resized.part(np.arange(7)), np.asarray(resized))
    )
    assert batches.dataset_size == 7 and len(batches) == 7
    for (inputs, targets), (others, same) in zip(batches, expected, strict=True):
        assert inputs.shape == (1, 3, 9, 9)
        assert torch.equal(inputs, others) and torch.equal(targets, same)
