"""Channel subsets: the dense gradient where they are, zero elsewhere, and only their input kept."""

from __future__ import annotations

import pytest
import torch
from conv_cases import ConvCase, conv_case, conv_cases
from hypothesis import given
from hypothesis import strategies as st
from kept_bytes import gradients, kept_bytes
from spies import spied
from torch import Tensor, nn

from fl_elastic.errors import PlanError
from fl_elastic.groups.mode import Axis
from fl_elastic.ops.channels import ChannelSubset
from fl_elastic.ops.convolution import channel_conv2d
from fl_elastic.ops.geometry import ConvGeometry

SAME = ConvGeometry((3, 3), padding=(1, 1))
DEPTHWISE = ConvGeometry((3, 3), padding=(1, 1), groups=8)


def weight_mask(case: ConvCase, channels: list[int], axis: Axis) -> Tensor:
    """Ones at the weights that read or write a channel, by a loop over all weights."""
    mask = torch.zeros_like(case.weight)
    rows, columns = case.weight.shape[:2]
    for row in range(rows):
        group = row // (rows // case.geometry.groups)
        for column in range(columns):
            channel = group * columns + column if axis == "in" else row
            mask[row, column] = float(channel in channels)
    return mask


def check(case: ConvCase, channels: list[int], axis: Axis) -> None:
    subset = ChannelSubset.of(channels, axis, case.weight.shape, case.geometry.groups)
    tensors = case.x, case.weight, case.bias
    expected, of_plain = gradients(case.plain, *tensors, gradient=case.gradient)
    output, of_lean = gradients(
        lambda x, weight, bias: channel_conv2d(x, weight, bias, case.geometry, subset),
        *tensors, gradient=case.gradient,
    )  # fmt: skip
    assert torch.equal(output, expected)
    of_plain[1] *= weight_mask(case, channels, axis)
    torch.testing.assert_close(of_lean, of_plain, rtol=1e-12, atol=1e-12)


@given(conv_cases(), st.sampled_from(["in", "out"]), st.data())
def test_gradient_is_the_mask_times_the_dense_one(
    case: ConvCase, axis: Axis, data: st.DataObject
) -> None:
    count = case.x.shape[1] if axis == "in" else case.weight.shape[0]
    channels = data.draw(
        st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    )
    check(case, channels, axis)


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize(
    ("groups", "channels"), [(1, (9, 10)), (8, (1, 1)), (4, (1, 3)), (3, (4, 3))]
)
@pytest.mark.parametrize("chosen", [[5], [0, 1, 2], [7, 3], list(range(8))])
def test_every_kind_of_convolution(
    axis: Axis, groups: int, channels: tuple[int, int], chosen: list[int]
) -> None:
    geometry = ConvGeometry((3, 3), (2, 1), (1, 0), groups=groups)
    case = conv_case(geometry, (7, 6), channels=channels)
    count = case.x.shape[1] if axis == "in" else case.weight.shape[0]
    check(case, [channel for channel in chosen if channel < count] or [0], axis)


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(
    ("geometry", "width", "axis", "chosen", "kept"),
    [
        (SAME, 8, "in", [1, 4, 6], 3),
        (SAME, 8, "in", [4, 3], 2),
        (SAME, 8, "out", [1, 4], 8),
        (DEPTHWISE, 1, "in", [1, 4, 6], 3),
        (DEPTHWISE, 1, "out", [1, 4, 6], 3),
        (ConvGeometry((1, 1), groups=2), 4, "in", [1, 6], 2),
        (ConvGeometry((1, 1), groups=2), 4, "out", [5], 4),
    ],
)
def test_exactly_the_needed_input_is_kept(
    geometry: ConvGeometry,
    width: int,
    axis: Axis,
    chosen: list[int],
    kept: int,
    order: torch.memory_format,
) -> None:
    conv = nn.Conv2d(8, 8, geometry.kernel, padding=geometry.padding, groups=geometry.groups)
    assert conv.weight.shape[1] == width
    subset = ChannelSubset.of(chosen, axis, conv.weight.shape, geometry.groups)
    x = torch.randn(4, 8, 6, 5).contiguous(memory_format=order).requires_grad_()

    def run() -> Tensor:
        return channel_conv2d(x, conv.weight, conv.bias, geometry, subset)

    assert kept_bytes(run, besides=conv) == 4 * kept * 6 * 5 * 4
    conv.weight.requires_grad_(False)
    assert kept_bytes(run, besides=conv) == 0
    assert run().is_contiguous(memory_format=order)


def test_nothing_is_computed_for_what_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    called = spied(monkeypatch, ConvGeometry, "input_gradient", "weight_gradient")
    subset = ChannelSubset.of([0], "in", (8, 8, 3, 3), 1)
    x, weight = torch.randn(2, 8, 5, 5), torch.randn(8, 8, 3, 3)
    bias = torch.zeros(8, requires_grad=True)
    for of_x, of_weight in [(False, True), (True, False), (True, True), (False, False)]:
        leaf_x, leaf_weight = (
            x.clone().requires_grad_(of_x), weight.clone().requires_grad_(of_weight)
        )  # fmt: skip
        called.clear()
        channel_conv2d(leaf_x, leaf_weight, bias, SAME, subset).sum().backward()
        assert (leaf_x.grad is not None, leaf_weight.grad is not None) == (of_x, of_weight)
        assert ("input_gradient" in called, "weight_gradient" in called) == (of_x, of_weight)


def test_the_gradient_has_the_memory_format_of_the_weight() -> None:
    weight = torch.randn(8, 8, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    subset = ChannelSubset.of([2, 5], "in", weight.shape, 1)
    channel_conv2d(torch.randn(2, 8, 5, 5), weight, None, SAME, subset).sum().backward()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize(
    ("channels", "axis", "said"),
    [
        ([], "in", r"no channels.*0\.\.11"),
        ([12], "in", r"channel 12 .*0\.\.11"),
        ([-1, 2], "in", r"channel -1 .*0\.\.11"),
        ([6], "out", r"channel 6 .*0\.\.5"),
        ([3, 1, 3], "out", r"channel 3 .*twice"),
    ],
)
def test_impossible_channels_are_refused(channels: list[int], axis: Axis, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ChannelSubset.of(channels, axis, (6, 4, 1, 1), 3)
