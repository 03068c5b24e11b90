"""A frozen batch norm is the one of torch in eval mode, and keeps a float per channel."""

from __future__ import annotations

import pytest
import torch
from kept_bytes import gradients, kept_bytes
from torch import Tensor
from torch.nn import functional

from fl_elastic.ops.norm import frozen_batch_norm


def statistics(channels: int, affine: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    mean, variance = torch.randn(channels).double(), torch.rand(channels).double() + 0.1
    if not affine:
        return mean, variance, None, None
    return mean, variance, torch.randn(channels).double(), torch.randn(channels).double()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5), (4, 6, 5, 3), (2, 6, 3, 2, 2)])
def test_output_and_gradient_are_those_of_torch(shape: tuple[int, ...], affine: bool) -> None:
    mean, variance, weight, bias = statistics(6, affine)
    x, gradient = torch.randn(shape).double(), torch.randn(shape).double()

    def plain(x: Tensor) -> Tensor:
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.1, 1e-3)

    def lean(x: Tensor) -> Tensor:
        return frozen_batch_norm(x, mean, variance, weight, bias, 1e-3)

    expected, of_plain = gradients(plain, x, gradient=gradient)
    output, of_lean = gradients(lean, x, gradient=gradient)
    assert torch.equal(output, expected)
    torch.testing.assert_close(of_lean, of_plain, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lean, (x.requires_grad_(),))


def test_one_float_per_channel_is_kept_and_the_order_too() -> None:
    mean, variance, weight, bias = (torch.rand(6) + 1 for _ in range(4))
    x = torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    assert kept_bytes(lambda: frozen_batch_norm(x, mean, variance, weight, bias, 1e-5)) == 24
    output = frozen_batch_norm(x, mean, variance, weight, bias, 1e-5)
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_the_affine_pair_gets_no_gradient() -> None:
    weight, bias = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    x = torch.randn(2, 3, 2, 2, requires_grad=True)
    frozen_batch_norm(x, torch.zeros(3), torch.ones(3), weight, bias, 1e-5).sum().backward()
    assert weight.grad is None
    assert bias.grad is None
