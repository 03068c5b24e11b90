"""Blocks of transformers, from the graph alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import chain, conv_net, images, vectors
from torch.nn.functional import cross_entropy
from vision_transformers import DEPTH, class_loss, small_images, vision_transformer

from fl_elastic.groups.trace import trace_step
from fl_elastic.methods.tokens.blocks import token_blocks

BLOCKS = {
    "torchvision": "encoder.layers.encoder_layer_{}",
    "timm": "blocks.{}",
    "transformers": "vit.layers.{}",
    "eager": "vit.layers.{}",
    "distilled": "blocks.{}",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_found_whoever_wrote_the_model(name: str) -> None:
    model = vision_transformer(name)
    graph = trace_step(model, class_loss, small_images()[0]).graph
    found = token_blocks(graph)
    # The last one may be known by the module that holds all of them, which puts out the same.
    assert [each.module for each in found[:-1]] == [
        BLOCKS[name].format(i) for i in range(DEPTH - 1)
    ]
    assert len(found) == DEPTH
    assert {(each.tokens, each.width) for each in found} == {
        (18 if name == "distilled" else 17, 16)
    }
    for place, block in enumerate(found[:-1]):
        above = {p for group in graph.groups[: block.groups_above] for p in group.parameters}
        inner = {
            f"{BLOCKS[name].format(i)}.{parameter}"
            for i in range(place + 1, DEPTH)
            for parameter, _ in model.get_submodule(BLOCKS[name].format(i)).named_parameters()
        }
        below = {p for p in dict(model.named_parameters()) if p not in above}
        assert inner <= above
        assert any(p.startswith(BLOCKS[name].format(place)) for p in below)


def test_other_models_have_none() -> None:
    for model, batch in ((chain(), vectors()[0]), (conv_net(), images()[0])):
        assert token_blocks(trace_step(model, cross_entropy, batch).graph) == ()


def test_windowed_attention_is_none_of_them() -> None:
    model = of_timm_swin()
    assert token_blocks(trace_step(model, class_loss, small_images()[0]).graph) == ()


def of_timm_swin() -> Any:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, patch_size=4, embed_dim=8, depths=(1, 1),
        num_heads=(1, 2), num_classes=3, window_size=4,
    )  # fmt: skip


def test_a_head_right_behind_the_last_block_hides_none() -> None:
    """No norm in between: what the head takes in is nearer to the loss than what the block puts out."""
    model = vision_transformer("timm")
    model.norm = torch.nn.Identity()
    graph = trace_step(model, class_loss, small_images()[0]).graph
    assert [each.groups_above for each in token_blocks(graph)] == [19, 13, 7, 1]
