"""Narrow models: the same numbers as the wide model with the other channels set to zero."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from small_models import Attention, Inception, Residual, TiedLinears, chain, conv_net
from torch import Tensor, nn

from fl_elastic.errors import ModelError
from fl_elastic.named_models import build_model
from fl_elastic.testing.probes import Snapshot
from fl_elastic_simulations.peers.narrow import kept_entries, narrow_model
from fl_elastic_simulations.peers.widths import channels_of


class Mobile(nn.Module):
    """A depthwise convolution, a gate over channels, a residual sum and two linear layers behind a view."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.gate = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 6, 1)
        self.hidden = nn.Linear(6 * 16, 10)
        self.hidden_norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        gate = torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        x = x + nn.functional.silu(self.depthwise(x))
        x = nn.functional.max_pool2d(self.last(x * gate), 2)
        x = torch.relu(self.hidden_norm(self.hidden(x.view(x.size(0), -1))))
        out: Tensor = self.head(x)
        return out


def registered(name: str, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: build_model(name, shape, 3, seed=1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "chain": (chain, (6,)),
    "plain": (lambda: conv_net("none"), (3, 8, 8)),
    "batch_norm": (conv_net, (3, 8, 8)),
    "residual": (Residual, (3, 8, 8)),
    "mobile": (Mobile, (3, 8, 8)),
    "resnet": (registered("small_resnet_bn", (3, 16, 16)), (3, 16, 16)),
    "vgg": (registered("vgg11_bn", (3, 32, 32)), (3, 32, 32)),
}


def scrambled(model: nn.Module) -> nn.Module:
    """The model with no two channels alike, also in its norms."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("rate", [1 / 2, 1 / 4, 1 / 16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("first", [0, 5])
def test_a_narrow_model_is_the_wide_one_with_channels_set_to_zero(
    case: str, rate: float, first: int
) -> None:
    build, shape = CASES[case]
    model = scrambled(build())
    inputs = torch.randn(5, *shape)
    layers = channels_of(model, inputs)
    starts = {layer.outputs.space: first % layer.outputs.size for layer in layers}
    narrow = narrow_model(model, layers, rate, starts, scaled=False)
    dense = deepcopy(model)
    for name, entries in kept_entries(model, layers, rate, starts).items():
        parameter = dense.get_parameter(name)
        kept = torch.zeros_like(parameter)
        kept[np.ix_(*entries)] = 1.0
        with torch.no_grad():
            parameter *= kept
        assert narrow.get_parameter(name).shape == tuple(map(len, entries))
    assert sum(p.numel() for p in narrow.parameters()) < sum(p.numel() for p in dense.parameters())
    torch.testing.assert_close(narrow(inputs), dense(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_at_full_width_nothing_is_cut(case: str) -> None:
    build, shape = CASES[case]
    model = build()
    layers = channels_of(model, torch.randn(2, *shape))
    kept = kept_entries(model, layers, 1.0, {layer.outputs.space: 1 for layer in layers})
    lengths = {name: tuple(map(len, entries)) for name, entries in kept.items()}
    assert all(np.array_equal(np.sort(e), e) for entries in kept.values() for e in entries)
    assert lengths == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_the_scaler_divides_behind_each_inner_layer_in_training() -> None:
    model = chain()
    inputs = torch.randn(4, 6)
    narrow = narrow_model(model, channels_of(model, inputs), 0.5)
    x = inputs
    for place in (0, 2, 4):
        weight, bias = model[place].weight, model[place].bias
        x = torch.relu((x @ weight[:6, :6].T + bias[:6]) / 0.5)
    expected = x @ model[6].weight[:, :6].T + model[6].bias
    torch.testing.assert_close(narrow(inputs), expected)
    unscaled = narrow_model(model, channels_of(model, inputs), 0.5, scaled=False)
    torch.testing.assert_close(narrow.eval()(inputs), unscaled.eval()(inputs))


def test_a_narrow_batch_norm_keeps_no_statistics() -> None:
    model = conv_net()
    narrow = narrow_model(model, channels_of(model, torch.randn(2, 3, 8, 8)), 0.5)
    assert list(narrow.buffers()) == []
    inputs = torch.randn(6, 3, 8, 8)
    training = narrow_model(model, channels_of(model, inputs), 0.5, scaled=False)
    torch.testing.assert_close(training(inputs), training.eval()(inputs))


def test_a_group_norm_keeps_the_groups_that_divide_its_channels() -> None:
    model = build_model("digits_cnn", (1, 8, 8), 10, seed=0)
    layers = channels_of(model, torch.randn(2, 1, 8, 8))
    for rate, expected in ((1 / 2, (4, 4, 8, 8)), (1 / 4, (2, 2, 4, 4)), (1 / 8, (1, 1, 2, 2))):
        narrow = narrow_model(model, layers, rate)
        norms = [m for m in narrow.modules() if isinstance(m, nn.GroupNorm)]
        assert tuple(norm.num_groups for norm in norms) == expected
        assert narrow(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_what_joins_in_a_sum_shrinks_together() -> None:
    layers = {layer.module: layer for layer in channels_of(Residual(), torch.randn(1, 3, 8, 8))}
    assert layers["second"].outputs == layers["short"].outputs == layers["head"].inputs
    assert layers["first"].outputs.space != layers["second"].outputs.space
    assert layers["first"].inputs.fixed and layers["short"].inputs.fixed
    assert [name for name, layer in layers.items() if layer.is_output] == ["head"]


def test_tracing_leaves_no_mark() -> None:
    model = conv_net()
    inputs = torch.randn(2, 3, 8, 8)
    before = Snapshot(model)
    channels_of(model, inputs)
    assert before.differences() == []


class Branching(nn.Module):
    """Its way depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.sum() > 0 else -out


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (Attention(), (6,), "cannot be traced, so not be made narrower"),
        (Inception(), (3, 8, 8), "cat cannot be made narrower"),
        (build_model("small_vit", (3, 32, 32), 3, seed=0), (3, 32, 32), "cannot be made narrower"),
        (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)), (4, 8, 8), "Conv2d"),
        (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (6,), "LayerNorm"),
        (nn.Sequential(nn.Linear(6, 8), nn.Softmax(1), nn.Linear(8, 3)), (6,), "Softmax"),
        (nn.Sequential(nn.Linear(6, 3)), (4, 6), "Linear"),
        (TiedLinears(), (6,), "tied"),
        (Branching(), (6,), "cannot be traced"),
    ],
)
def test_other_models_are_refused_with_the_reason(
    model: nn.Module, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        channels_of(model, torch.randn(2, *shape))
