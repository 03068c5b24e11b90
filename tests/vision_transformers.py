"""Small vision transformers of the libraries that people bring, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Make = Callable[[], nn.Module]
DEPTH = 4


def class_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropy of scores, or of what a model of transformers puts out."""
    return cross_entropy(getattr(outputs, "logits", outputs), targets)


def small_images(batches: int = 1, size: int = 4, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Batches of 3 x 32 x 32 images of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 32, 32, generator=generator),
         torch.randint(3, (size,), generator=generator))
        for _ in range(batches)
    ]  # fmt: skip


def of_torchvision(**more: Any) -> nn.Module:
    """Queries, keys and values in one parameter of nn.MultiheadAttention."""
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    model: nn.Module = models.VisionTransformer(32, 8, DEPTH, 2, 16, 32, num_classes=3, **more)
    # Its own start answers the same whatever it sees.
    nn.init.normal_(model.get_parameter("heads.head.weight"))
    return model


def of_timm(name: str = "vit_tiny_patch16_224", **more: Any) -> nn.Module:
    """Queries, keys and values of one linear layer."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": DEPTH, "num_heads": 2} | more
    made: nn.Module = timm.create_model(name, num_classes=3, **size)
    return made


def of_transformers(attention: str = "sdpa") -> nn.Module:
    """Queries, keys and values of three linear layers; ``eager`` attends in single operations."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=DEPTH, num_attention_heads=2, intermediate_size=32,
        image_size=32, patch_size=8, num_labels=3, attn_implementation=attention,
    )  # fmt: skip
    made: nn.Module = transformers.ViTForImageClassification(config)
    return made


MAKES: dict[str, Make] = {
    "torchvision": of_torchvision,
    "timm": of_timm,
    "transformers": of_transformers,
    "eager": lambda: of_transformers("eager"),
    "distilled": lambda: of_timm("deit_tiny_distilled_patch16_224"),
}


def vision_transformer(name: str, seed: int = 0) -> nn.Module:
    """Return one of `MAKES`; the attention of its class token is far from even."""
    torch.manual_seed(seed)
    model = MAKES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.shape[0] >= 16:
                parameter.mul_(3)
    return model
