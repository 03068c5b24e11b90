"""Convolutions with a frozen weight: exact gradients, and nothing kept."""

from __future__ import annotations

import pytest
import torch
from conv_cases import ConvCase, conv_cases
from hypothesis import given
from kept_bytes import gradients, kept_bytes
from torch import Tensor, nn

from fl_elastic.ops.convolution import frozen_conv2d
from fl_elastic.ops.geometry import ConvGeometry

SAME = ConvGeometry((3, 3), padding=(1, 1))


@given(conv_cases())
def test_input_and_bias_gradient_are_exact(case: ConvCase) -> None:
    def lean(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return frozen_conv2d(x, weight, bias, case.geometry, trains_bias=True)

    tensors = case.x, case.weight, case.bias
    expected, of_plain = gradients(case.plain, *tensors, gradient=case.gradient)
    output, of_lean = gradients(lean, *tensors, gradient=case.gradient)
    assert torch.equal(output, expected)
    assert output.stride() == expected.stride()
    torch.testing.assert_close(of_lean[0], of_plain[0], rtol=1e-12, atol=1e-12)
    assert not of_lean[1].any()
    torch.testing.assert_close(of_lean[2], of_plain[2], rtol=1e-12, atol=1e-12)


@given(conv_cases())
def test_the_exact_weight_gradient_is_that_of_torch(case: ConvCase) -> None:
    _, (_, of_weight) = gradients(
        lambda x, weight: case.plain(x, weight, None), case.x, case.weight, gradient=case.gradient
    )
    ours = case.geometry.weight_gradient(case.gradient, case.x, torch.empty_like(case.weight))
    torch.testing.assert_close(ours, of_weight, rtol=1e-12, atol=1e-12)


def test_only_the_weight_is_kept() -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    run = lambda: frozen_conv2d(x, conv.weight, conv.bias, SAME, trains_bias=True)  # noqa: E731
    assert kept_bytes(run, besides=conv) == 0
    assert kept_bytes(run) == conv.weight.nbytes
    x.requires_grad_(False)
    assert kept_bytes(run) == 0


@pytest.mark.parametrize("trains_bias", [True, False])
def test_only_what_is_needed_gets_a_gradient(trains_bias: bool) -> None:
    x = torch.randn(2, 4, 8, 8)
    weight, bias = torch.randn(6, 4, 3, 3), torch.randn(6, requires_grad=True)
    output = frozen_conv2d(x, weight, bias, SAME, trains_bias=trains_bias)
    output.sum().backward()
    assert x.grad is None
    assert (bias.grad is not None) == trains_bias


@pytest.mark.parametrize(
    ("conv", "expected"),
    [
        (nn.Conv2d(4, 8, 3), ConvGeometry((3, 3))),
        (nn.Conv2d(4, 8, (1, 5), stride=(2, 1), padding=(0, 2)), ConvGeometry((1, 5), (2, 1), (0, 2))),
        (nn.Conv2d(4, 8, 3, padding="valid", groups=4), ConvGeometry((3, 3), groups=4)),
        (nn.Conv2d(4, 8, (3, 5), padding="same", dilation=(2, 1)),
         ConvGeometry((3, 5), padding=(2, 2), dilation=(2, 1))),
        (nn.Conv2d(4, 8, 2, padding="same"), None),
        (nn.Conv2d(4, 8, 2, padding="same", dilation=2), ConvGeometry((2, 2), padding=(1, 1), dilation=(2, 2))),
        (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), None),
        (nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), None),
    ],
)  # fmt: skip
def test_geometry_of_a_module(conv: nn.Conv2d, expected: ConvGeometry | None) -> None:
    geometry = ConvGeometry.of(conv)
    assert geometry == expected
    x = torch.randn(2, 4, 9, 7)
    if geometry is not None:
        assert torch.equal(geometry.convolve(x, conv.weight, conv.bias), conv(x))
        assert geometry.output_size((9, 7)) == conv(x).shape[2:]


@pytest.mark.parametrize("inputs", [1, 2, 3, 8])
def test_the_weight_gradient_of_a_strided_1x1_kernel_on_few_channels(inputs: int) -> None:
    # In single precision, as models are: in double, the kernel of torch that errs here is not used.
    geometry = ConvGeometry((1, 1), stride=(2, 2))
    generator = torch.Generator().manual_seed(inputs)
    for _ in range(30):
        x = torch.randn(4, inputs, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        gradient = torch.randn(4, 12, 4, 4, generator=generator)
        gradient = gradient.to(memory_format=torch.channels_last)
        found = geometry.weight_gradient(gradient, x, torch.empty(12, inputs, 1, 1))
        expected = torch.einsum("nohw,nihw->oi", gradient, x[:, :, ::2, ::2])
        torch.testing.assert_close(found[:, :, 0, 0], expected, rtol=1e-4, atol=1e-4)
