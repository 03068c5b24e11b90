"""A residual network, an inverted-residual network, and others, for tests of lean runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Basic(nn.Module):
    """Two 3 x 3 convolutions with norms, a short cut, and one ReLU module used twice."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.short = (
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
            if stride > 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y)) + self.short(x)
        out: Tensor = self.relu(y)
        return out


def resnet() -> nn.Sequential:
    """Stem with max pooling, three blocks, head."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
        Basic(8, 8, 1), Basic(8, 12, 2), Basic(12, 12, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


class Inverted(nn.Module):
    """Widen, depthwise, narrow; added to its input where the shapes allow it."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: type[nn.Module]) -> None:
        super().__init__()
        wide = 3 * inputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), activation(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            activation(inplace=True),
            nn.Conv2d(wide, outputs, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


def mobile(activation: type[nn.Module] = nn.ReLU6) -> nn.Sequential:
    """Stem, three inverted residuals, head."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), activation(inplace=True),
        Inverted(8, 8, 1, activation), Inverted(8, 10, 2, activation), Inverted(10, 10, 1, activation),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 5),
    )  # fmt: skip


def settled(model: nn.Module) -> nn.Module:
    """``model`` in eval mode with norms that are not the identity, and nothing trained."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                assert tensor is not None
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
            assert module.running_var is not None
            module.running_var.copy_(
                torch.rand(module.running_var.shape, generator=generator) + 0.5
            )
    return model.eval().requires_grad_(False)
