"""A small vision transformer that classifies by a class token."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["HEAD", "class_token_vit"]

HEAD = "heads."
"""Prefix of the names of its head's tensors."""
_PIXELS, _PATCH, _BLOCKS, _HEADS, _WIDTH, _PERCEPTRON = 32, 4, 6, 4, 64, 128


def class_token_vit(classes: int, seed: int) -> nn.Module:
    """Return torchvision's transformer with six blocks of width 64 on 64 patches of 32 x 32 images.

    It has 0.2 million parameters, and random weights that only depend on the seed.

    Examples
    --------
    >>> class_token_vit(10, seed=0)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    from torchvision.models import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: nn.Module = VisionTransformer(
            _PIXELS, _PATCH, _BLOCKS, _HEADS, _WIDTH, _PERCEPTRON, num_classes=classes
        )
        # torchvision initialises the head with zeros, through which no gradient flows in the first step.
        nn.init.trunc_normal_(model.get_parameter(f"{HEAD}head.weight"), std=0.02)
    return model
