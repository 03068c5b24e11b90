"""Parts that the named models share: normalisation, residual blocks, transformer blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def group_norm(width: int) -> nn.Module:
    """Return a group normalisation with up to eight groups, as many as divide ``width``.

    Unlike batch normalisation it keeps no statistics of the local data, which clients with different data would
    have to reconcile.

    Examples
    --------
    >>> group_norm(20).num_groups
    4
    """
    return nn.GroupNorm(math.gcd(8, width), width)


def batch_norm(width: int) -> nn.Module:
    """Return a batch normalisation for images."""
    return nn.BatchNorm2d(width)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group normalisation beside a shortcut, after He et al. 2016.

    Parameters
    ----------
    inputs, outputs : int
        Channels; if they differ, or the stride is not 1, a 1x1 convolution adapts the shortcut.
    stride : int
        Stride of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = group_norm(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = group_norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), group_norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the two convolutions' result and the shortcut."""
        inner = functional.relu(self.first_norm(self.first(x)))
        inner = self.second_norm(self.second(inner))
        return functional.relu(inner + self.shortcut(x))


class VisionTokens(nn.Module):
    """Cut an image into square patches and turn each into a token with a learned position.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of the image; pixels beyond the last whole patch are ignored.
    patch : int
        Side of a patch.
    width : int
        Length of a token.
    """

    def __init__(self, shape: tuple[int, ...], *, patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape[0], width, patch, stride=patch)
        tokens = (shape[1] // patch) * (shape[2] // patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of shape (batch, tokens, width)."""
        tokens: Tensor = self.patches(x).flatten(2).transpose(1, 2)
        return tokens + self.position


class TransformerBlock(nn.Module):
    """Self-attention and a two-layer perceptron, each normalised first and added to its input.

    Parameters
    ----------
    width : int
        Length of a token.
    heads : int
        Attention heads; ``width`` is divided evenly among them.
    """

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the same shape as ``x``."""
        batch, tokens, width = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        query, key, value = projected.view(
            batch, tokens, 3, self.heads, width // self.heads
        ).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, tokens, width))
        output: Tensor = x + self.perceptron(x)
        return output


class MeanOverTokens(nn.Module):
    """Average tokens into one vector per image."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over the second dimension."""
        return x.mean(dim=1)
