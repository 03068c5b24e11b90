"""Activations that keep bits have the gradients of plain PyTorch, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kept_bytes import gradients, kept_bytes
from torch import Tensor
from torch.nn import functional

from fl_elastic.ops.activations import hardswish, relu, relu6

PAIRS = [
    (relu, functional.relu),
    (relu6, functional.relu6),
    (hardswish, functional.hardswish),
]
every_pair = pytest.mark.parametrize(("ours", "plain"), PAIRS, ids=["relu", "relu6", "hardswish"])
Activation = Callable[..., Tensor]


def kinks() -> Tensor:
    """Values on, next to and far from every kink, and random ones."""
    corners = torch.tensor([-6.0, -3.0, -1.5, -0.0, 0.0, 1.5, 3.0, 6.0, 9.0])
    up = torch.nextafter(corners, torch.tensor(torch.inf))
    down = torch.nextafter(corners, torch.tensor(-torch.inf))
    tiny = torch.tensor([1e-40, -1e-40, 1e-45, torch.inf, -torch.inf, 1e-30, 1e-8, -1e-8])
    return torch.cat([corners, up, down, tiny, 4 * torch.randn(61)]).view(2, 3, 4, 4)


@every_pair
@pytest.mark.parametrize("spread", [0.5, 1.0, 40.0])
@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
def test_gradients_are_those_of_torch(
    ours: Activation, plain: Activation, spread: float, order: torch.memory_format
) -> None:
    x = (spread * kinks()).contiguous(memory_format=order)
    gradient = torch.randn_like(x)
    output, (of_x,) = gradients(ours, x, gradient=gradient)
    expected, (of_plain,) = gradients(plain, x, gradient=gradient)
    assert output.stride() == x.stride()
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(of_x, of_plain, rtol=0, atol=0, equal_nan=True)


@every_pair
def test_gradients_at_the_kinks_without_scaling(ours: Activation, plain: Activation) -> None:
    x = kinks().double()
    torch.testing.assert_close(
        gradients(ours, x)[1], gradients(plain, x)[1], rtol=0, atol=0, equal_nan=True
    )


@every_pair
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_in_place_overwrites_the_input(ours: Activation, plain: Activation, spread: float) -> None:
    def through(activation: Activation) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            inner = spread * x
            output = activation(inner, inplace=True)
            assert output.data_ptr() == inner.data_ptr()
            return output * torch.arange(x.numel()).view(x.shape)

        return run

    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    (output, of_x), (expected, of_plain) = gradients(through(ours), x), gradients(through(plain), x)
    assert torch.equal(output, expected)
    assert torch.equal(of_x[0], of_plain[0])


@every_pair
def test_in_place_on_a_part_of_a_tensor(ours: Activation, plain: Activation) -> None:
    def through(activation: Activation) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            whole = 5 * x
            activation(whole[:, 1:3], inplace=True)
            return whole**2

        return run

    x = torch.randn(2, 5, 3, 3)
    assert torch.equal(gradients(through(ours), x)[1][0], gradients(through(plain), x)[1][0])


def test_in_place_on_a_leaf_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="leaf"):
        relu(torch.zeros(3, requires_grad=True), inplace=True)


@pytest.mark.parametrize("activation", [relu, relu6])
def test_rectifiers_keep_one_bit_per_element(activation: Activation) -> None:
    x = torch.randn(4, 16, 8, 8, requires_grad=True)
    assert kept_bytes(lambda: activation(x)) == x.numel() // 8


def test_hardswish_keeps_the_inner_floats_only_where_that_is_less() -> None:
    x = (40 * torch.randn(4, 16, 8, 8)).requires_grad_()
    inner = int((x.abs() <= 3).sum())
    assert kept_bytes(lambda: hardswish(x)) == 4 * inner + 2 * x.numel() // 8
    near = torch.randn(4, 16, 8, 8, requires_grad=True)
    assert kept_bytes(lambda: hardswish(near)) == 4 * near.numel()


@every_pair
def test_nothing_is_kept_without_gradients(ours: Activation, plain: Activation) -> None:
    x = torch.randn(2, 3, 4, 4)
    assert kept_bytes(lambda: ours(x)) == 0
    expected = plain(x)
    with torch.no_grad():
        assert torch.equal(ours(x.clone().requires_grad_()), expected)
        assert kept_bytes(lambda: ours(x, inplace=True)) == 0
    assert torch.equal(x, expected)
