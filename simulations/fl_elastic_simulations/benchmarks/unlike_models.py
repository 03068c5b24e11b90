"""Eight models of different kinds with random weights, each with one batch, to test memory budgets on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_elastic.groups import Batch
from fl_elastic.named_models import resolve_model

__all__ = ["UNLIKE_MODELS", "UnlikeModel"]

_CLASSES, _WORDS = 10, 2000


@dataclass(frozen=True)
class UnlikeModel:
    """How to make a model and its batch.

    Attributes
    ----------
    make : callable
        Returns the model in training mode.
    shape : tuple of int
        Shape of a batch's inputs.
    words : bool
        Whether inputs and targets are word numbers, with one target for each word.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool = False

    def model(self) -> nn.Module:
        """Return the model with the weights of seed 0."""
        torch.manual_seed(0)
        return self.make().train()

    def batch(self) -> Batch:
        """Return a random batch, the same in every call."""
        generator = torch.Generator().manual_seed(0)
        if self.words:
            inputs, targets = torch.randint(0, _WORDS, (2, *self.shape), generator=generator)
            return inputs, targets
        targets = torch.randint(0, _CLASSES, self.shape[:1], generator=generator)
        return torch.randn(self.shape, generator=generator), targets


class _Words(nn.Module):
    """Two LSTM layers that predict the next word at each place; returns ``[N, words, T]``, as losses need."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 192)
        self.cells = nn.LSTM(192, 256, 2, batch_first=True)
        self.head = nn.Linear(256, _WORDS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.cells(self.embedding(x))[0])
        return scores.transpose(1, 2)


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(64, 8, 6, 3, 192, 768, num_classes=_CLASSES)
    return model


def _group_norm_net() -> nn.Module:
    from torchvision.models import resnet18

    model: nn.Module = resnet18(
        num_classes=_CLASSES, norm_layer=lambda channels: nn.GroupNorm(8, channels)
    )
    return model


def _vgg() -> nn.Module:
    from torchvision.models import vgg11_bn

    body = vgg11_bn().features
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, _CLASSES))


def _line() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((9, 64), (64, 64), (64, 128), (128, 128), (128, 256)):
        layers += [nn.Conv1d(inputs, outputs, 5, padding=2), nn.BatchNorm1d(outputs), nn.ReLU()]
        if outputs != inputs:
            layers.append(nn.MaxPool1d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, _CLASSES))


def _vision(name: str) -> Callable[[], nn.Module]:
    return lambda: resolve_model(name, _CLASSES)


UNLIKE_MODELS: dict[str, UnlikeModel] = {
    "ResNet-18": UnlikeModel(_vision("resnet18"), (32, 3, 128, 128)),
    "MobileNetV2": UnlikeModel(_vision("mobilenet_v2"), (32, 3, 128, 128)),
    "SqueezeNet 1.1": UnlikeModel(_vision("squeezenet1_1"), (32, 3, 128, 128)),
    "ViT": UnlikeModel(_vit, (32, 3, 64, 64)),
    "LSTM language model": UnlikeModel(_Words, (32, 64), words=True),
    "VGG-11 with BatchNorm": UnlikeModel(_vgg, (32, 3, 64, 64)),
    "ResNet-18 with GroupNorm": UnlikeModel(_group_norm_net, (32, 3, 96, 96)),
    "1-d convolutions": UnlikeModel(_line, (64, 9, 512)),
}
