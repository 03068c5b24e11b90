"""Every kind of small model with a batch of its own, for what must hold of all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import (
    Attention,
    Batch,
    Inception,
    Recurrent,
    Residual,
    TiedEmbedding,
    TiedLinears,
    chain,
    conv_net,
    images,
    vectors,
)  # fmt: skip
from torch import nn


def tokens() -> Batch:
    return torch.randint(11, (5, 7)), torch.randint(11, (5,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "chain": (chain, lambda: vectors()[0]),
    "batch norm": (conv_net, lambda: images()[0]),
    "group norm": (lambda: conv_net("group"), lambda: images()[0]),
    "residual": (Residual, lambda: images()[0]),
    "inception": (Inception, lambda: images()[0]),
    "tied linears": (TiedLinears, lambda: vectors()[0]),
    "tied embedding": (TiedEmbedding, tokens),
    "attention": (Attention, lambda: vectors()[0]),
    "recurrent": (Recurrent, lambda: vectors()[0]),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> tuple[nn.Module, Batch]:
    make, batch = MODELS[name]
    return make(), batch()
