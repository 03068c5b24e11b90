"""Filtered gradients: the rule by loops, and the cases where it must be exact or nearly so."""

from __future__ import annotations

import math

import pytest
import torch
from conv_cases import ConvCase, conv_case, conv_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_bytes import gradients, kept_bytes
from slow_filter import slow_filter
from spies import spied
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fl_elastic.methods.gradient_filter import operation as module
from fl_elastic.methods.gradient_filter.gradients import pooled_input, tap_shares
from fl_elastic.methods.gradient_filter.operation import filtered_conv2d
from fl_elastic.ops.geometry import ConvGeometry

SAME = ConvGeometry((3, 3), padding=(1, 1))


def filtered(case: ConvCase, patch: int, inputs: bool) -> tuple[Tensor, list[Tensor]]:
    """Output, and the gradients of input, weight and bias."""
    return gradients(
        lambda x, weight, bias: filtered_conv2d(
            x, weight, bias, case.geometry, patch, filters_input=inputs
        ),
        case.x, case.weight, case.bias, gradient=case.gradient,
    )  # fmt: skip


def exact(case: ConvCase) -> tuple[Tensor, list[Tensor]]:
    return gradients(case.plain, case.x, case.weight, case.bias, gradient=case.gradient)


def check_against_loops(case: ConvCase, patch: int) -> None:
    of_weight, of_input = slow_filter(case.x, case.weight, case.gradient, case.geometry, patch)
    expected, of_plain = exact(case)
    for inputs in (False, True):
        output, ours = filtered(case, patch, inputs)
        assert torch.equal(output, expected)
        of_x = of_input if inputs else of_plain[0]
        for mine, reference in zip(ours, (of_x, of_weight, of_plain[2]), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-11)


@settings(max_examples=60)
@given(conv_cases(), st.integers(1, 9))
@pytest.mark.slow
def test_the_rule_is_that_of_the_loops(case: ConvCase, patch: int) -> None:
    check_against_loops(case, patch)


@pytest.mark.parametrize("patch", [1, 2, 3, 4, 100])
@pytest.mark.parametrize(
    ("geometry", "size", "channels"),
    [
        (SAME, (8, 8), (2, 3)),
        (SAME, (7, 5), (2, 3)),
        (ConvGeometry((3, 3), (2, 2), (1, 1)), (8, 8), (2, 3)),
        (ConvGeometry((3, 3), (2, 2), (1, 1)), (7, 9), (2, 3)),
        (ConvGeometry((3, 3)), (8, 7), (2, 3)),
        (ConvGeometry((7, 7), (2, 2), (3, 3)), (9, 9), (1, 2)),
        (ConvGeometry((4, 4), (4, 4)), (8, 8), (1, 2)),
        (ConvGeometry((1, 1), (2, 2)), (7, 8), (2, 3)),
        (ConvGeometry((3, 3), padding=(2, 2), dilation=(2, 2)), (6, 7), (2, 2)),
        (ConvGeometry((3, 3), padding=(1, 1), groups=4), (5, 6), (1, 1)),
        (ConvGeometry((3, 3), (2, 2), (1, 1), groups=3), (5, 6), (1, 2)),
        (ConvGeometry((3, 3), padding=(1, 1), groups=2), (5, 4), (2, 3)),
    ],
)
def test_common_geometries(
    geometry: ConvGeometry, size: tuple[int, int], channels: tuple[int, int], patch: int
) -> None:
    check_against_loops(conv_case(geometry, size, 1, channels), patch)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("inputs", [0, 1])
def test_the_norm_is_right_at_every_stride(stride: int, inputs: int) -> None:
    # Smooth maps: what filtering assumes, so that a wrong scale cannot hide behind its error.
    generator = torch.Generator().manual_seed(1)
    side = 24 * stride
    x = (
        interpolate(
            torch.randn(4, 8, 4, 4, generator=generator), size=(side, side), mode="bicubic"
        ).double()
        + 1
    )
    gradient = (
        interpolate(
            torch.randn(4, 8, 4, 4, generator=generator), size=(24, 24), mode="bicubic"
        ).double()
        + 1
    )
    # A smooth kernel too: an input gradient keeps the mean tap only.
    weight = torch.randn(8, 8, 1, 1, generator=generator).double() + 0.1 * torch.randn(
        8, 8, 3, 3, generator=generator
    )
    geometry = ConvGeometry((3, 3), (stride, stride), (1, 1))
    case = ConvCase(geometry, x, weight, torch.zeros(8).double(), gradient)
    ours, reference = filtered(case, 2, True)[1][inputs ^ 1], exact(case)[1][inputs ^ 1]
    if inputs:
        # The exact input gradient alternates between pixels of a cell; its cell means must agree.
        ours, reference = (pooled_input(maps, geometry, 1) for maps in (ours, reference))
    ratio = float(ours.norm() / reference.norm())
    assert 0.8 < ratio < 1.2
    assert float((ours * reference).sum() / ours.norm() / reference.norm()) > 0.95


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("patch", [2, 3])
@pytest.mark.parametrize("size", [(8, 8), (7, 10), (1, 1)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_exactly_the_means_are_kept(
    size: tuple[int, int], patch: int, stride: int, kernel: int, order: torch.memory_format
) -> None:
    conv = nn.Conv2d(6, 4, kernel, stride, padding=kernel // 2)
    geometry = ConvGeometry.of(conv)
    assert geometry is not None
    x = torch.randn(2, 6, *size).contiguous(memory_format=order).requires_grad_()

    def run() -> Tensor:
        return filtered_conv2d(x, conv.weight, conv.bias, geometry, patch, filters_input=True)

    cells = math.ceil(size[0] / (patch * stride)) * math.ceil(size[1] / (patch * stride))
    assert kept_bytes(run, besides=conv) == 4 * 2 * 6 * cells
    conv.weight.requires_grad_(False)
    assert kept_bytes(run, besides=conv) == 0


def test_nothing_is_computed_for_what_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    called = spied(
        monkeypatch, module, "filtered_input_gradient", "filtered_weight_gradient", "pooled_input"
    )
    case = conv_case(SAME)
    for of_x, of_weight in [(False, True), (True, False), (True, True), (False, False)]:
        called.clear()
        x = case.x.clone().requires_grad_(of_x)
        weight = case.weight.clone().requires_grad_(of_weight)
        bias = case.bias.clone().requires_grad_()
        filtered_conv2d(x, weight, bias, SAME, 2, filters_input=True).sum().backward()
        assert (x.grad is not None, weight.grad is not None) == (of_x, of_weight)
        assert called.count("filtered_input_gradient") == of_x
        assert called.count("filtered_weight_gradient") == of_weight
        assert called.count("pooled_input") == of_weight
    called.clear()
    with torch.no_grad():
        filtered_conv2d(case.x, case.weight.clone().requires_grad_(), None, SAME, 2)
    assert called == []


def test_formats_of_the_gradients() -> None:
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    for geometry in (SAME, ConvGeometry((3, 3))):
        x.grad = weight.grad = None
        output = filtered_conv2d(x, weight, None, geometry, 2, filters_input=True)
        assert output.is_contiguous(memory_format=torch.channels_last)
        output.mean((2, 3)).sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert x.grad.is_contiguous(memory_format=torch.channels_last)
        assert weight.grad.stride() == weight.stride()


def test_tap_shares_of_a_padded_kernel() -> None:
    shares = tap_shares(SAME, (4, 5), torch.zeros(1, dtype=torch.float64))
    rows, columns = torch.tensor([0.75, 1, 0.75]), torch.tensor([0.8, 1, 0.8])
    torch.testing.assert_close(shares, torch.outer(rows, columns).double())
    alone = tap_shares(SAME, (1, 1), torch.zeros(1))
    assert alone.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
