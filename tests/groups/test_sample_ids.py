"""Examples are told apart by their content, wherever in memory it lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fl_elastic.groups.sample_ids import sample_ids
from fl_elastic.training.head_pass import head_sums

TABLE = torch.randn(9, 10, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "part",
    [
        lambda table: table.t(),
        lambda table: table[:, 1:3],
        lambda table: table[:, ::2],
        lambda table: table[:, 3],
        lambda table: table[1:, 3:5],
        lambda table: table.flatten()[1:9].reshape(4, 2),
        lambda table: table.half().flatten()[1:9].reshape(2, 4),
        lambda table: (table > 0)[::2, 1:9],
        lambda table: table[:, :1].expand(9, 4),
        lambda table: table.reshape(9, 5, 2).transpose(0, 1),
        lambda table: table[:, :0],
    ],
)
def test_a_part_of_a_table_is_known_as_its_copy_is(part: Callable[[Tensor], Tensor]) -> None:
    given = part(TABLE)
    copied = given.clone(memory_format=torch.contiguous_format)
    assert sample_ids(given) == sample_ids(copied)
    assert sample_ids({"rows": given}) == sample_ids({"rows": copied})
    assert len(set(sample_ids(given))) == (len(given) if given.numel() else 1)


def test_columns_of_a_table_get_a_head() -> None:
    """As they come from a data frame, whose columns lie one after the other, or are chosen by name."""
    classes = torch.arange(9) % 2
    expected = head_sums(nn.Linear(2, 2), [(TABLE[:, 1:3].clone(), classes)])
    for rows in (TABLE[:, 1:3], TABLE.t().contiguous().t()[:, 1:3]):
        found = head_sums(nn.Linear(2, 2), [(rows, classes)])
        assert (found.products == expected.products).all()
        assert len(found.folds) == len(expected.folds)
