"""A quick test for NaN and infinity says what a test of each element says."""

from __future__ import annotations

import pytest
import torch

from fl_elastic.groups.forward import all_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("put", [[], [float("nan")], [float("inf")], [float("inf"), -float("inf")]])
@pytest.mark.parametrize("scale", [1.0, 3e4])
def test_as_a_test_of_each_element(dtype: torch.dtype, put: list[float], scale: float) -> None:
    generator = torch.Generator().manual_seed(len(put))
    tensor = (scale * torch.rand(7, 31, generator=generator)).to(dtype)
    tensor.view(-1)[: len(put)] = torch.tensor(put, dtype=dtype)
    assert all_finite(tensor) is bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_elements_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    assert all_finite(torch.full((9,), torch.finfo(dtype).max, dtype=dtype))


def test_nothing_is_finite() -> None:
    assert all_finite(torch.zeros(0))
