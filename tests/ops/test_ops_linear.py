"""Linear layers that train a part of their weight."""

from __future__ import annotations

import pytest
import torch
from kept_bytes import gradients, kept_bytes
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.groups.mode import Axis
from fl_elastic.ops.linear import FeatureSubset, bias_linear, channel_linear


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradient_is_the_mask_times_the_dense_one(
    leading: tuple[int, ...], axis: Axis, has_bias: bool
) -> None:
    x, gradient = torch.randn(*leading, 7).double(), torch.randn(*leading, 4).double()
    weight, bias = torch.randn(4, 7).double(), torch.randn(4).double()
    chosen = [3, 1]
    subset = FeatureSubset.of(chosen, axis, weight.shape)
    expected, dense = gradients(
        lambda x, w, b: functional.linear(x, w, b if has_bias else None),
        x, weight, bias, gradient=gradient,
    )  # fmt: skip
    output, ours = gradients(
        lambda x, w, b: channel_linear(x, w, b if has_bias else None, subset),
        x, weight, bias, gradient=gradient,
    )  # fmt: skip
    mask = torch.zeros_like(weight)
    if axis == "in":
        mask[:, chosen] = 1
    else:
        mask[chosen] = 1
    dense[1] *= mask
    assert torch.equal(output, expected)
    torch.testing.assert_close(ours, dense, rtol=1e-13, atol=1e-13)


def test_bias_only() -> None:
    x, weight, bias = torch.randn(2, 5, 7), torch.randn(4, 7), torch.randn(4)
    _, dense = gradients(functional.linear, x, weight, bias)
    _, ours = gradients(bias_linear, x, weight, bias)
    torch.testing.assert_close([ours[0], ours[2]], [dense[0], dense[2]])
    assert not ours[1].any()


def test_a_penalty_on_the_gradient_is_refused_and_a_graph_that_nobody_follows_is_not() -> None:
    x, layer = torch.randn(6, 7, requires_grad=True), nn.Linear(7, 1)
    subset = FeatureSubset.of([1, 5], "in", layer.weight.shape)
    scores = channel_linear(x, layer.weight, layer.bias, subset)
    # What comes in depends on nothing, what goes out is the weight.
    (of_input,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    torch.testing.assert_close(of_input, layer.weight.expand(6, 7))
    with pytest.raises(TrainingError, match="gradient penalty"):
        of_input.square().sum().backward()
    assert layer.weight.grad is None


def test_only_the_needed_features_are_kept() -> None:
    layer = nn.Linear(16, 8)
    x = torch.randn(10, 16, requires_grad=True)

    def run(axis: Axis) -> Tensor:
        subset = FeatureSubset.of([1, 5, 6], axis, layer.weight.shape)
        return channel_linear(x, layer.weight, layer.bias, subset)

    assert kept_bytes(lambda: run("in"), besides=layer) == 10 * 3 * 4
    assert kept_bytes(lambda: run("out"), besides=layer) == x.nbytes
    assert kept_bytes(lambda: bias_linear(x, layer.weight, layer.bias), besides=layer) == 0
    layer.weight.requires_grad_(False)
    assert kept_bytes(lambda: run("in"), besides=layer) == 0
    run("in").sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


@pytest.mark.parametrize(
    ("features", "axis", "said"),
    [
        ([], "in", "no channels"),
        ([7], "in", r"channel 7 .*0\.\.6"),
        ([4], "out", r"channel 4 .*0\.\.3"),
    ],
)
def test_impossible_features_are_refused(features: list[int], axis: Axis, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        FeatureSubset.of(features, axis, (4, 7))
