"""Models of timm, as small as their settings allow, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from subject import Subject, classes, pairs
from torch.nn.functional import cross_entropy

timm = pytest.importorskip("timm", reason="timm, whose models these are, is not installed")


def _timm(name: str, size: int = 32, **settings: Any) -> Subject:
    model = timm.create_model(name, pretrained=False, num_classes=3, **settings)

    def batch(generator: torch.Generator) -> tuple[Any, Any]:
        return torch.randn(4, 3, size, size, generator=generator), classes(generator)

    return pairs(model, cross_entropy, batch)


def timm_vit() -> Subject:
    return _timm(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2,
        drop_path_rate=0.3,
    )  # fmt: skip


def timm_deit_distilled() -> Subject:
    return _timm(
        "deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2,
        num_heads=2,
    )  # fmt: skip


def timm_resnet() -> Subject:
    return _timm("resnet10t", channels=(8, 8, 16, 16), stem_width=8)


def timm_efficientnet() -> Subject:
    return _timm("tf_efficientnet_b0", drop_path_rate=0.3)


def timm_mobilenet_v3() -> Subject:
    return _timm("mobilenetv3_small_050")


def timm_convnext() -> Subject:
    return _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), drop_path_rate=0.3)


def timm_regnet() -> Subject:
    return _timm("regnetx_002")


def timm_mixer() -> Subject:
    return _timm("mixer_s32_224", 64, img_size=64)


def timm_swin() -> Subject:
    return _timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2),
        num_heads=(2, 2),
    )  # fmt: skip


def timm_nf_regnet() -> Subject:
    """Weights standardised in every step, no norms."""
    return _timm("nf_regnet_b0", drop_path_rate=0.3)


def timm_ghostnet() -> Subject:
    return _timm("ghostnet_050")


def timm_levit() -> Subject:
    return _timm("levit_128s", 224, embed_dim=(16, 16, 16), num_heads=(2, 2, 2), depth=(1, 1, 1))
