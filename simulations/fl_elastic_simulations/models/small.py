"""Small models for scenarios."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from torch import nn

from fl_elastic.errors import ModelError
from fl_elastic.named_models import MODELS, Shape, need_image
from fl_elastic_simulations.models.blocks import (
    MeanOverTokens,
    ResidualBlock,
    TransformerBlock,
    VisionTokens,
    batch_norm,
    group_norm,
)

Norm = Callable[[int], nn.Module]

_KINDS: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((nn.Conv1d, nn.Conv2d), "conv"),
    ((nn.GroupNorm, nn.BatchNorm2d, nn.LayerNorm), "norm"),
    ((ResidualBlock, TransformerBlock), "block"),
    ((nn.Linear,), "head"),
)


def _named(*layers: nn.Module) -> nn.Sequential:
    """Chain layers under names that readers of a plan or heat map recognise: conv1, norm1, ..., head."""
    counts: Counter[str] = Counter()
    named: dict[str, nn.Module] = {}
    for layer in layers:
        kind = next(
            (k for kinds, k in _KINDS if isinstance(layer, kinds)), type(layer).__name__.lower()
        )
        counts[kind] += 1
        named[kind if kind == "head" else f"{kind}{counts[kind]}"] = layer
    return nn.Sequential(OrderedDict(named))


def _conv(inputs: int, outputs: int, norm: Norm = group_norm) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    return [convolution, norm(outputs), nn.ReLU()]


@MODELS.register("digits_cnn")
def _digits_cnn(shape: Shape, classes: int) -> nn.Module:
    """Return four convolutions with group normalisation for 8x8 images, 49 k parameters.

    Widths are chosen so that no layer is much larger than the others: if the last linear layer held most
    parameters, there would be nothing to choose.
    """
    need_image("digits_cnn", shape, pixels=4)
    return _digits(shape, classes, group_norm)


@MODELS.register("digits_cnn_bn")
def _digits_cnn_bn(shape: Shape, classes: int) -> nn.Module:
    """Return ``digits_cnn`` with batch normalisation, whose running statistics travel as well."""
    need_image("digits_cnn_bn", shape, pixels=4)
    return _digits(shape, classes, batch_norm)


def _digits(shape: Shape, classes: int, norm: Norm) -> nn.Module:
    return _named(
        *_conv(shape[0], 24, norm),
        *_conv(24, 40, norm),
        nn.MaxPool2d(2),
        *_conv(40, 48, norm),
        *_conv(48, 48, norm),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 48, classes),
    )


@MODELS.register("small_cnn")
def _small_cnn(shape: Shape, classes: int) -> nn.Module:
    """Return four convolutions with group normalisation for 28x28 or 32x32 images, 192 k parameters."""
    need_image("small_cnn", shape, pixels=16)
    return _named(
        *_conv(shape[0], 48),
        nn.MaxPool2d(2),
        *_conv(48, 80),
        nn.MaxPool2d(2),
        *_conv(80, 96),
        *_conv(96, 96),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 96, classes),
    )


@MODELS.register("resnet8")
def _resnet8(shape: Shape, classes: int) -> nn.Module:
    """Return three residual blocks, 16, 32 and 64 wide, after a first layer of stride 2: for large simulations."""
    need_image("resnet8", shape, pixels=16)
    return _named(
        nn.Conv2d(shape[0], 16, 3, stride=2, padding=1, bias=False),
        group_norm(16),
        nn.ReLU(),
        ResidualBlock(16, 16, stride=1),
        ResidualBlock(16, 32, stride=2),
        ResidualBlock(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


@MODELS.register("small_vit")
def _small_vit(shape: Shape, classes: int) -> nn.Module:
    """Return four transformer blocks of width 128 on patches of 8x8 pixels (4x4 below 64 pixels)."""
    need_image("small_vit", shape, pixels=8)
    patch = 8 if min(shape[1:]) >= 64 else 4
    return _named(
        VisionTokens(shape, patch=patch, width=128),
        *[TransformerBlock(128, heads=4) for _ in range(4)],
        nn.LayerNorm(128),
        MeanOverTokens(),
        nn.Linear(128, classes),
    )


@MODELS.register("har_cnn")
def _har_cnn(shape: Shape, classes: int) -> nn.Module:
    """Return four convolutions along time, for windows of motion sensors."""
    if len(shape) != 2 or shape[1] < 16:
        raise ModelError(
            f"har_cnn takes windows of (channels, 16 or more samples), not inputs of shape {shape}"
        )
    layers: list[nn.Module] = []
    inputs = shape[0]
    for width in (32, 48, 64, 64):
        layers += [nn.Conv1d(inputs, width, 5, padding=2), group_norm(width), nn.ReLU()]
        layers.append(nn.MaxPool1d(2))
        inputs = width
    layers += [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return _named(*layers)
