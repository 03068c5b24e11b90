"""Multiply-adds against counts by hand and by a loop over modules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.profiling.layer_shapes import group_layers
from fl_elastic.profiling.macs import backward_macs, group_macs, node_macs, passing_nodes
from fl_elastic.testing import made_up_profile


def traced(model: nn.Module, inputs: Tensor) -> BackwardGraph:
    batch = inputs, torch.zeros(len(inputs), dtype=torch.long)
    return trace_step(model, cross_entropy, batch).graph


def counted(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """Multiply-adds of each layer by what it puts out, as a module hook sees it."""
    seen: dict[str, float] = {}
    handles = []

    def hook(name: str) -> Any:
        def note(module: nn.Module, _: Any, output: Tensor) -> None:
            if isinstance(module, nn.Conv2d):
                taps = module.in_channels // module.groups * math.prod(module.kernel_size)
                seen[name] = seen.get(name, 0) + output.numel() * taps
            elif isinstance(module, nn.Linear):
                seen[name] = seen.get(name, 0) + output.numel() * module.in_features

        return note

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(hook(name)))
    model(inputs)
    for handle in handles:
        handle.remove()
    return seen


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), nn.Conv2d(8, 6, (1, 3), groups=2),
        nn.Flatten(2), nn.Linear(8, 5), nn.Flatten(), nn.Linear(30, 4),
    )  # fmt: skip


def test_layers_count_what_they_put_out_times_their_taps() -> None:
    model, inputs = net(), torch.randn(3, 3, 8, 8)
    graph = traced(model, inputs)
    expected = counted(model, inputs)
    found = dict(zip([g.name for g in graph.groups], group_macs(graph).tolist(), strict=True))
    assert found == {"1": 0.0} | expected
    assert found["0"] == 3 * 4 * 4 * 8 * 3 * 9
    assert node_macs(graph).sum() == sum(expected.values())


def test_a_layer_that_is_used_twice_counts_twice() -> None:
    shared = nn.Linear(6, 6)
    model, inputs = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(6, 2)), torch.randn(4, 6)
    graph = traced(model, inputs)
    assert group_macs(graph).tolist() == [4 * 12, 2 * 4 * 36]
    # Of the shared layer, one use passes the gradient to the other.
    assert backward_macs(graph, [Mode.FULL, Mode.FULL]) == 2 * 48 + 3 * 144


@pytest.mark.parametrize(("channels", "groups"), [(5, 1), (4, 1), (4, 4), (8, 2)])
def test_a_transposed_convolution_counts_its_input(channels: int, groups: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.ConvTranspose2d(4, channels, 2, stride=2, groups=groups),
        nn.Flatten(),
        nn.Linear(channels * 64, 2),
    )
    graph = traced(model, torch.randn(2, 3, 4, 4))
    assert group_macs(graph)[1] == 2 * 16 * (4 * channels * 4) // groups
    assert 1 not in group_layers(graph)


def backward_of(graph: BackwardGraph, **modes: Mode) -> float:
    named = {name.strip("_"): mode for name, mode in modes.items()}
    return backward_macs(graph, [named.get(g.name, Mode.FROZEN) for g in graph.groups])


class Enlarged(nn.Module):
    """A convolution on a picture of bytes, enlarged before; no gradient flows to these, so no node shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(interpolate(x.float(), scale_factor=2)).flatten(1)
        return out


def test_a_first_layer_may_read_an_enlarged_input() -> None:
    shape = (2, 3, 8, 8)
    graph = traced(Enlarged(), torch.zeros(shape, dtype=torch.uint8))
    (layer,) = group_layers(graph, shape).values()
    assert (layer.in_channels, layer.in_size, layer.out_size) == (3, (16, 16), (16, 16))


def test_backward_counts_the_way_and_the_trained_share() -> None:
    graph = traced(net(), torch.randn(3, 3, 8, 8))
    own = dict(zip([g.name for g in graph.groups], group_macs(graph).tolist(), strict=True))
    head, rows, grouped, deep, stem = (own[name] for name in ("9", "7", "5", "3", "0"))
    assert backward_of(graph, _9=Mode.FULL) == head
    assert backward_of(graph, _7=Mode.FULL) == head + rows
    assert backward_of(graph, _9=Mode.FULL, _7=Mode.FULL) == 2 * head + rows
    assert backward_of(graph, _7=Mode.channels(1 / 4, "out")) == head + rows / 5
    assert backward_of(graph, _3=Mode.channels(1 / 4)) == head + rows + grouped + deep / 4
    assert backward_of(graph, _3=Mode.BIAS) == head + rows + grouped
    # The norm lies below the depthwise layer, the stem below both.
    assert backward_of(graph, _1=Mode.FULL) == head + rows + grouped + deep
    assert backward_of(graph, _0=Mode.FULL) == head + rows + grouped + deep + stem
    assert backward_of(graph) == 0


def test_filtered_gradients_count_one_tap_per_patch() -> None:
    graph = traced(net(), torch.randn(3, 3, 8, 8))
    own = dict(zip([g.name for g in graph.groups], group_macs(graph).tolist(), strict=True))
    way = own["9"] + own["7"] + own["5"]
    assert backward_of(graph, _3=Mode.filtered(2)) == way + own["3"] / (4 * 9)
    only_weight = backward_of(graph, _3=Mode.filtered(2), _0=Mode.FULL)
    both = backward_of(graph, _3=Mode.filtered(2, inputs=True), _0=Mode.FULL)
    assert only_weight == pytest.approx(way + own["3"] * (1 + 1 / 36) + own["0"])
    assert both == pytest.approx(way + own["3"] * 2 / 36 + own["0"])


@pytest.mark.parametrize("seed", range(5))
def test_nodes_pass_on_what_the_profile_says(seed: int) -> None:
    profile = made_up_profile(groups=13, branched=True, seed=seed)
    generator = np.random.default_rng(seed)
    for _ in range(10):
        mask = generator.random(13) < 0.2
        assert np.array_equal(passing_nodes(profile.graph, mask), profile.running_nodes(mask)[1])
