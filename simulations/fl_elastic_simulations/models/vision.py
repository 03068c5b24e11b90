"""A small vision transformer, plain and with low-rank adapters."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fl_elastic_simulations.models.adapters import with_adapters
from fl_elastic_simulations.models.blocks import MeanOverTokens, TransformerBlock, VisionTokens

__all__ = ["HEAD", "adapted_vision_model", "seeded_vision_model", "vision_model"]

HEAD = "head."
"""Prefix of the names of its head's tensors."""
_SHAPE, _PATCH, _BLOCKS, _WIDTH, _HEADS = (3, 32, 32), 4, 8, 192, 6
_ADAPTED = ("query_key_value", "perceptron.1")


def vision_model(classes: int) -> nn.Module:
    """Return eight blocks of width 192 on 64 patches of 32 x 32 images, with 2.4 million random weights.

    Examples
    --------
    >>> vision_model(10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    tokens = VisionTokens(_SHAPE, patch=_PATCH, width=_WIDTH)
    blocks = {
        f"block{number}": TransformerBlock(_WIDTH, heads=_HEADS) for number in range(1, _BLOCKS + 1)
    }
    return nn.Sequential(
        OrderedDict(
            [("tokens", tokens), *blocks.items(), ("norm", nn.LayerNorm(_WIDTH)),
             ("pool", MeanOverTokens()), ("head", nn.Linear(_WIDTH, classes))]
        )
    )  # fmt: skip


def seeded_vision_model(classes: int, seed: int) -> nn.Module:
    """Return the model with random weights that only depend on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return vision_model(classes)


class _InColour(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, _SHAPE[0], -1, -1)


def adapted_vision_model(classes: int = 10) -> nn.Module:
    """Return the model, frozen, with adapters in every block and a trained head for other classes.

    It accepts grey and colour images.

    Examples
    --------
    >>> model = adapted_vision_model()
    >>> model(torch.zeros(2, 1, 32, 32)).shape
    torch.Size([2, 10])
    >>> trained = [name for name, each in model.named_parameters() if each.requires_grad]
    >>> len(trained), trained[-2:]
    (34, ['head.weight', 'head.bias'])
    """
    model = with_adapters(vision_model(classes), _ADAPTED)
    model.get_submodule(HEAD.rstrip(".")).requires_grad_(True)
    # The added module has no tensors, so the names of loaded tensors do not change.
    return nn.Sequential(OrderedDict([("colour", _InColour()), *model.named_children()]))
