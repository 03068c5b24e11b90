"""A small causal language model over characters, plain and with low-rank adapters."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fl_elastic_simulations.data.plays import CHARACTERS, LENGTH
from fl_elastic_simulations.models.adapters import with_adapters
from fl_elastic_simulations.models.blocks import TransformerBlock

__all__ = ["BLOCKS", "adapted_language_model", "language_model"]

BLOCKS = 8
_WIDTH, _HEADS = 192, 6
_ADAPTED = ("query_key_value", "perceptron.1")


class TextTokens(nn.Module):
    """A vector for each character, plus one for its position."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, _WIDTH)
        self.position = nn.Parameter(torch.zeros(1, LENGTH, _WIDTH))
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Return tokens of shape (batch, length, width)."""
        found: Tensor = self.characters(codes) + self.position[:, : codes.shape[1]]
        return found


class NextCharacter(nn.Module):
    """Scores of the next character, with characters on the second axis, as cross-entropy expects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, CHARACTERS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of shape (batch, characters, length)."""
        scores: Tensor = self.linear(tokens)
        return scores.transpose(1, 2)


def language_model() -> nn.Module:
    """Return a decoder of eight blocks of width 192, 2.4 million parameters, with random weights."""
    blocks = {
        f"block{number}": TransformerBlock(_WIDTH, heads=_HEADS, causal=True)
        for number in range(1, BLOCKS + 1)
    }
    return nn.Sequential(
        OrderedDict(
            [("tokens", TextTokens()), *blocks.items(), ("norm", nn.LayerNorm(_WIDTH)),
             ("head", NextCharacter())]
        )
    )  # fmt: skip


def adapted_language_model() -> nn.Module:
    """Return the same model, frozen, with adapters in the attention and the perceptron of every block."""
    return with_adapters(language_model(), _ADAPTED)
