"""Lean runs that join filtered convolutions: the same gradients, from fewer bytes and nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept_bytes import kept_bytes
from lean_models import mobile, settled
from torch import Tensor, nn

from fl_elastic.groups import Mode
from fl_elastic.methods.gradient_filter.joined import joined_forward
from fl_elastic.ops.lean import lean
from fl_elastic.ops.lean_forward import LeanForward

WX = Mode.filtered(2, inputs=True)


def mobile_plan() -> tuple[nn.Module, dict[str, Mode]]:
    """Every convolution but the stem filtered."""
    model = settled(mobile()).double().to(memory_format=torch.channels_last)
    modes = {
        name: WX for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and name != "0"
    }
    for name in modes:
        model.get_submodule(name).requires_grad_(True)
    return model, modes


def found(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_gradients_are_those_of_unjoined_ones_from_fewer_bytes() -> None:
    model, modes = mobile_plan()
    x = torch.randn(2, 3, 32, 32).double().requires_grad_()
    with lean(model, modes):
        expected = found(model, x)
        kept = kept_bytes(lambda: model(x), besides=model)
    with lean(model, modes, joins=True):
        assert isinstance(model.get_submodule("3.layers").__dict__["forward"], LeanForward)
        ours = found(model, x)
        joined = kept_bytes(lambda: model(x), besides=model)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    assert len(ours) > 10
    # Counts of open units take two bits per element at this side of patches, so that kept bytes hardly move.
    assert joined < 1.1 * kept
    assert not any("forward" in module.__dict__ for module in model.modules())


def layers(*more: nn.Module) -> nn.Sequential:
    made = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *more,
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
    )
    return settled(made)


def modes_of(model: nn.Module) -> dict[nn.Module, Mode]:
    return {module: WX for module in model.modules() if isinstance(module, nn.Conv2d)}


def test_what_stands_between_two_convolutions_keeps_them_apart() -> None:
    model = layers()
    assert joined_forward(model, modes_of(model)) is not None
    for between in (nn.MaxPool2d(2), nn.Dropout(), nn.Conv2d(4, 4, 1, stride=2), nn.Sigmoid()):
        model = layers(between)
        assert joined_forward(model, modes_of(model)) is None


def test_only_equal_patches_filtered_on_both_sides_are_joined() -> None:
    model = layers()
    first, second = modes_of(model)
    for other in (Mode.filtered(2), Mode.FROZEN, Mode.filtered(4, inputs=True), Mode.channels(0.5)):
        assert joined_forward(model, {first: WX, second: other}) is None
    assert joined_forward(model, {first: WX}) is None
    assert joined_forward(model[0], {first: WX}) is None
    assert joined_forward(nn.ModuleList([model]), {first: WX, second: WX}) is None


@pytest.mark.parametrize("name", ["0", "0.0", "0.1", "0.2", "1", "2"])
def test_hooks_are_called(name: str) -> None:
    model = layers().requires_grad_(False)
    called: list[bool] = []

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        called.append(True)

    model.get_submodule(name).register_forward_hook(hook)
    modes = {n: WX for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with lean(model, modes, joins=True):
        model(x)
    assert called == [True]


def test_a_norm_that_is_trained_again_is_not_joined() -> None:
    model = layers()
    modes = {n: WX for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with lean(model, modes, joins=True):
        model[2].requires_grad_(True)
        model(x).sum().backward()
    assert model[2].weight.grad is not None
