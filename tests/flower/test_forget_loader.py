"""Examples that a client gives up, by their numbers: the rest is what it would be without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from fl_elastic.errors import TrainingError
from fl_elastic.flower.forget_request import parted

X, Y = torch.arange(46.0).reshape(23, 2), torch.arange(23)
DATA = TensorDataset(X, Y)


class Endless(IterableDataset[Any]):
    """Has no numbers."""

    def __iter__(self) -> Any:
        return iter(DATA)


def drawn(loader: Any) -> list[int]:
    """Return the examples in their order; each has its own inputs."""
    found = [int(each) for x, y in loader for each in y if torch.equal(x[y == each], X[each][None])]
    assert len(found) == sum(len(y) for _, y in loader)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_both_parts_are_all_examples_in_their_order(seed: int) -> None:
    draw = np.random.default_rng(seed)
    gone = draw.permutation(23)[: draw.integers(1, 23)].tolist()
    size = int(draw.integers(1, 9))
    for loader in (
        list(zip(X.split(size), Y.split(size), strict=True)),
        DataLoader(DATA, batch_size=size),
    ):
        rest, given_up = parted(loader, gone)
        assert drawn(given_up) == sorted(gone)
        assert drawn(rest) == [each for each in range(23) if each not in gone]


@pytest.mark.parametrize("ids", [np.array([2, 5]), torch.tensor([5, 2]), [np.uint8(2), 5]])
def test_numbers_may_be_those_of_numpy_and_torch(ids: Any) -> None:
    rest, gone = parted([(X, Y)], ids)
    assert drawn(gone) == [2, 5] and len(drawn(rest)) == 21


def test_a_loader_draws_as_before() -> None:
    loader = DataLoader(
        DATA, batch_size=4, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(1)
    )
    rest, gone = parted(loader, [0, 7, 22])
    orders = [drawn(rest) for _ in range(20)]
    assert all(len(each) == 20 and not {0, 7, 22} & {*each} for each in orders)
    assert orders[0] != orders[1] and drawn(gone) == [0, 7, 22]
    with pytest.raises(TrainingError, match="no example of these data"):
        parted(loader, [23])


def test_batches_in_dicts_are_taken_apart() -> None:
    batches: Any = [
        {"pixels": X[:5], "labels": Y[:5], "use_cache": False},
        {"pixels": X[5:], "labels": Y[5:]},
    ]
    rest, gone = parted(batches, [1, 5])
    assert [each["labels"].tolist() for each in gone] == [[1], [5]]
    assert (
        sum(len(each["labels"]) for each in rest) == 21 and next(iter(rest))["use_cache"] is False
    )


@pytest.mark.parametrize(
    ("loader", "ids", "why"),
    [
        ([(X, Y)], [23], "numbers from 0 to 22"),
        ([(X, Y)], [-1], "no example"),
        ([(X, Y)], [True], "no example"),
        ([(X, Y)], ["3"], "no example"),
        ([(X, Y)], [1.7], "no example"),
        ([(X, Y)], 3, r"give \[3\]"),
        ([(X, Y)], "12", "are not a list"),
        ([(X, Y)], range(23), "no example would be left"),
        ([(X[:4].T, Y[:4])], [0], "first dimension of these batches is not"),
        (iter([(X, Y)]), [0], "which examples"),
        (DataLoader(Endless(), batch_size=2), [0], "which examples"),
        (DataLoader(DATA, batch_size=None), [0], "which examples"),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, False)), [0],
            "which examples",
        ),
        (
            DataLoader(DATA, sampler=torch.utils.data.RandomSampler(DATA, replacement=True)), [0],
            "may not draw each example once",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_parted_is_refused(loader: Any, ids: Any, why: str) -> None:
    with pytest.raises(TrainingError, match=why):
        parted(loader, ids)


def test_a_batch_without_examples_has_no_numbers() -> None:
    pair = (torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]))
    given: Any = [None, pair, [], pair]
    rest, gone = parted(given, [2])
    assert [x.tolist() for x, _ in rest] == [[[0.0], [1.0]], [[1.0]]]
    assert [x.tolist() for x, _ in gone] == [[[0.0]]]
