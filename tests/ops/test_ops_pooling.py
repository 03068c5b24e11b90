"""Max pooling that keeps a byte per output is that of torch, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_bytes import gradients, kept_bytes
from torch import Tensor
from torch.nn import functional

from fl_elastic.ops.pooling import MOST_PIXELS, _quotient, max_pool2d


@given(st.data())
def test_output_and_gradient_are_those_of_torch(data: st.DataObject) -> None:
    def pair(least: int, most: int) -> tuple[int, int]:
        return data.draw(st.integers(least, most)), data.draw(st.integers(least, most))

    kernel = pair(1, 5)
    padding = (
        data.draw(st.integers(0, kernel[0] // 2)), data.draw(st.integers(0, kernel[1] // 2))
    )  # fmt: skip
    stride = pair(1, 4)
    size = [
        max(1, k - 2 * p) + data.draw(st.integers(0, 9))
        for k, p in zip(kernel, padding, strict=True)
    ]
    order = data.draw(st.sampled_from([torch.channels_last, torch.contiguous_format]))
    # Few values, so that the largest is often found twice.
    x = torch.randint(-3, 3, (2, 3, *size)).double().contiguous(memory_format=order)

    def plain(x: Tensor) -> Tensor:
        return functional.max_pool2d(x, kernel, stride, padding)

    gradient = torch.randn(plain(x).shape).double()
    expected, of_plain = gradients(plain, x, gradient=gradient)
    output, ours = gradients(lambda x: max_pool2d(x, kernel, stride, padding), x, gradient=gradient)
    assert torch.equal(output, expected)
    assert output.stride() == expected.stride()
    assert torch.equal(ours[0], of_plain[0])


def test_a_window_of_256_taps() -> None:
    x = torch.randn(1, 2, 40, 40)
    arguments = (16, 16), (8, 8), (0, 0)
    ours = gradients(lambda x: max_pool2d(x, *arguments), x)[1]
    assert torch.equal(ours[0], gradients(lambda x: functional.max_pool2d(x, *arguments), x)[1][0])


def test_one_byte_per_output_is_kept() -> None:
    x = torch.randn(4, 8, 12, 12, requires_grad=True)
    assert kept_bytes(lambda: max_pool2d(x, (3, 3), (2, 2), (1, 1))) == 4 * 8 * 6 * 6


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 41, 224, 1021, 1448])
def test_division_as_floats_is_exact(divisor: int) -> None:
    numbers = torch.arange(MOST_PIXELS, dtype=torch.int32)
    assert torch.equal(_quotient(numbers, divisor), numbers // divisor)
