"""Attention of which some weights are zero, against attention written out token by token."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vision_transformers import class_loss, small_images, vision_transformer

from fl_elastic.errors import PlanError
from fl_elastic.groups.trace import trace_step
from fl_elastic.methods.tokens.attention_masks import largest_entries, thinning
from fl_elastic.methods.tokens.blocks import token_blocks
from fl_elastic.methods.tokens.kept import kept_count

FUSED = ["torchvision", "timm", "transformers", "distilled"]


def blocks_of(model: nn.Module) -> list[str]:
    graph = trace_step(model, class_loss, small_images()[0]).graph
    return [block.module for block in token_blocks(graph)]


def thinned(model: nn.Module, keep: float, attention: float, classes: int = 1) -> Any:
    """Blocks 1 and 2 of four leave tokens out, as policy e_vit lets them."""
    blocks = blocks_of(model)
    drops = {block: partial(kept_count, share=keep) for block in blocks[1:3]}
    return thinning(model, blocks[1:], drops, classes, partial(kept_count, share=attention))


def by_hand(model: Any, images: Tensor, keep: float, attention: float) -> Tensor:
    """Scores of a model of timm whose attention is written out, an example and a row at a time."""
    tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
    masks: list[Tensor | None] = [None] * len(images)
    for place, block in enumerate(model.blocks):
        qkv = block.attn.qkv(block.norm1(tokens)).reshape(*tokens.shape[:2], 3, 2, 8)
        out, chosen = [], []
        for example in range(len(images)):
            query, key, value = (qkv[example, :, each].transpose(0, 1) for each in range(3))
            weights = (query @ key.transpose(1, 2) / 8**0.5).exp()
            mask = masks[example]
            weights = weights if mask is None else weights * mask
            weights = weights / weights.sum(2, keepdim=True)
            out.append((weights @ value).transpose(0, 1).reshape(len(tokens[example]), 16))
            if place in (1, 2):
                mean = weights.detach().mean(0)
                count = kept_count(len(mean) - 1, keep)
                order = sorted(range(1, len(mean)), key=lambda i: (-float(mean[0, i]), i))
                stay = [0, *sorted(order[:count])]
                among = mean[stay][:, stay]
                new = torch.ones_like(among)
                for row in range(1, len(stay)):
                    best = sorted(range(1, len(stay)), key=lambda i: (-float(among[row, i]), i))
                    for column in best[kept_count(count, attention) :]:
                        new[row, column] = 0
                masks[example] = new
                chosen.append(stay)
        tokens = tokens + block.attn.proj(torch.stack(out))
        tokens = tokens + block.mlp(block.norm2(tokens))
        if chosen:
            tokens = torch.stack([each[stay] for each, stay in zip(tokens, chosen, strict=True)])
    scores: Tensor = model.head(model.norm(tokens)[:, 0])
    return scores


@pytest.mark.parametrize(("keep", "attention"), [(0.5, 0.3), (0.9, 0.5), (1.0, 0.2), (0.6, 1.0)])
def test_outputs_and_gradients_are_those_of_attention_written_out(
    keep: float, attention: float
) -> None:
    fast, slow = (vision_transformer("timm") for _ in range(2))
    images, targets = small_images()[0]
    with thinned(fast, keep, attention):
        outputs = fast(images)
        class_loss(outputs, targets).backward()
    expected = by_hand(slow, images, keep, attention)
    class_loss(expected, targets).backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(fast.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("training", [True, False])
def test_whoever_keeps_everything_is_the_plain_model(name: str, training: bool) -> None:
    model = vision_transformer(name).train(training)
    images = small_images()[0][0]
    classes = 2 if name == "distilled" else 1
    with torch.no_grad():
        plain = getattr(model(images), "logits", None)
        plain = model(images) if plain is None else plain
        for attention, same in ((1.0, True), (0.2, False)):
            with thinned(model, 1.0, attention, classes):
                found = model(images)
            found = getattr(found, "logits", found)
            assert torch.allclose(found, plain, rtol=1e-3, atol=1e-5) == same
        assert torch.equal(getattr(model(images), "logits", plain), plain)


def test_attention_of_other_threads_is_theirs() -> None:
    model = vision_transformer("timm")
    others: list[Tensor] = []
    given = torch.randn(1, 2, 3, 4)
    attend = torch.nn.functional.scaled_dot_product_attention

    class Beside(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            thread = threading.Thread(
                target=lambda: others.append(
                    torch.nn.functional.scaled_dot_product_attention(
                        given, given, given, is_causal=True
                    )
                )
            )
            thread.start()
            thread.join()
            return tokens

    model.get_submodule("blocks.2").norm1 = nn.Sequential(
        model.get_submodule("blocks.2.norm1"), Beside()
    )
    with thinned(model, 0.5, 0.5):
        model(small_images()[0][0])
    assert torch.equal(others[-1], attend(given, given, given, is_causal=True))
    assert torch.nn.functional.scaled_dot_product_attention is attend


def test_what_cannot_be_masked_is_refused_and_put_back() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    model = vision_transformer("eager")
    with pytest.raises(PlanError, match="scaled_dot_product_attention 0 times"):
        with thinned(model, 0.5, 0.5):
            model(small_images()[0][0])
    assert torch.nn.functional.scaled_dot_product_attention is attend
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_of_equal_weights_the_earlier_stay_and_class_tokens_always() -> None:
    weights = torch.full((1, 5, 5), 0.2)
    kept = largest_entries(weights, 2, 1)[0].int().tolist()
    assert kept == [[1] * 5, [1] * 5, *[[1, 1, 1, 0, 0]] * 3]
