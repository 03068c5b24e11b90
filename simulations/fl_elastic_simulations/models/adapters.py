"""Low-rank adapters beside frozen linear layers, as in LoRA."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["RANK", "LowRankLinear", "low_rank_layers", "with_adapters"]

RANK = 8
"""Rank of every adapter."""
_SCALE = 2.0


class LowRankLinear(nn.Linear):
    """A frozen linear layer plus a trained product of two thin ones (Hu et al., ICLR 2022).

    Its weight and bias are named as in a plain layer, so that weights of the model without adapters fit. The
    product is multiplied by 2, which is alpha = 2 r.

    Parameters
    ----------
    layer : nn.Linear
        Layer whose tensors it takes over.
    rank : int
        Rank of the product.
    """

    def __init__(self, layer: nn.Linear, rank: int = RANK) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.requires_grad_(False)
        self.scale = _SCALE
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.merged: Tensor | None = None

    def add_merged(self) -> None:
        """Add a zero weight that is not a parameter, for methods that fold trained changes into the layer."""
        del self.merged
        self.register_buffer("merged", torch.zeros_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of layer and adapter for ``x``."""
        weight = self.weight if self.merged is None else self.weight + self.scale * self.merged
        found: Tensor = functional.linear(x, weight, self.bias)
        return found + self.scale * cast(Tensor, self.lora_B(self.lora_A(x)))


def with_adapters(model: nn.Module, layers: tuple[str, ...]) -> nn.Module:
    """Freeze a model and add adapters to its linear layers whose names end with one of ``layers``.

    Examples
    --------
    >>> model = with_adapters(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), ("2",))
    >>> [name for name, each in model.named_parameters() if each.requires_grad]
    ['2.lora_A.weight', '2.lora_B.weight']
    """
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith(layers):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, LowRankLinear(module))
    return model


def low_rank_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    """Return the layers that have adapters, by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LowRankLinear)
    }
