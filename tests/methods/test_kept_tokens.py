"""Tokens by what the class token attends to, against attention written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vision_transformers import class_loss, small_images, vision_transformer

from fl_elastic.errors import PlanError
from fl_elastic.groups.trace import trace_step
from fl_elastic.methods.tokens.blocks import token_blocks
from fl_elastic.methods.tokens.dropping import ClassRows, dropping, kept_indices, taken

NAMES = ["torchvision", "timm", "transformers", "eager", "distilled"]


def weights_by_hand(name: str, block: nn.Module, tokens: Tensor) -> Tensor:
    """Softmax of all queries on all keys of a block, shape (N, heads, T, T)."""
    parts: Any = block
    if name == "torchvision":
        own = parts.self_attention
        both = nn.functional.linear(parts.ln_1(tokens), own.in_proj_weight, own.in_proj_bias)
    elif name in ("timm", "distilled"):
        both = parts.attn.qkv(parts.norm1(tokens))
    else:
        given = parts.layernorm_before(tokens)
        both = torch.cat([parts.attention.q_proj(given), parts.attention.k_proj(given)], dim=2)
    heads = [
        each.reshape(*tokens.shape[:2], 2, 8).transpose(1, 2) for each in both.split(16, 2)[:2]
    ]
    return (heads[0] @ heads[1].transpose(2, 3) / 8**0.5).softmax(3)


def kept_by_hand(weights: Tensor, classes: int, count: int) -> list[list[int]]:
    rows = weights[:, :, :classes].mean(dim=(1, 2)).tolist()
    found = []
    for row in rows:
        others = sorted(range(classes, len(row)), key=lambda place: (-row[place], place))
        found.append([*range(classes), *sorted(others[:count])])
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_a_block_hands_on_the_tokens_that_written_out_attention_points_at(
    name: str, training: bool
) -> None:
    model = vision_transformer(name).train(training)
    batch, classes = small_images()[0], 2 if name == "distilled" else 1
    block = token_blocks(trace_step(model, class_loss, batch).graph)[1].module
    seen: dict[str, Tensor] = {}
    module = model.get_submodule(block)
    handle = module.register_forward_hook(
        lambda _, given, out: seen.update(given=given[0], out=out)
    )
    with torch.set_grad_enabled(training):
        model(batch[0])
        before, whole = seen["given"], seen["out"]
        with dropping(model, block, classes, lambda count: count // 2):
            model(batch[0])
    handle.remove()
    expected = kept_by_hand(weights_by_hand(name, module, before), classes, 8)
    assert len({tuple(each) for each in expected}) > 1
    rows = [whole[i, places] for i, places in enumerate(expected)]
    torch.testing.assert_close(seen["out"], torch.stack(rows), rtol=0, atol=1e-5)
    assert "forward" not in module.__dict__


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_dense_model_fed_the_kept_tokens(name: str) -> None:
    model = vision_transformer(name)
    (images, targets), classes = small_images()[0], 2 if name == "distilled" else 1
    block = token_blocks(trace_step(model, class_loss, (images, targets)).graph)[1].module
    module, kept = model.get_submodule(block), []
    hook = module.register_forward_hook(lambda *given: kept.append(given[2].detach()))
    with dropping(model, block, classes, lambda count: count // 2):
        class_loss(model(images), targets).backward()
    hook.remove()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    hook = module.register_forward_hook(lambda *_: kept[0])
    class_loss(model(images), targets).backward()
    hook.remove()
    above = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert 0 < len(above) < len(found)
    for parameter, gradient in above.items():
        torch.testing.assert_close(found[parameter], gradient)


def test_equal_scores_keep_the_earlier_tokens_in_their_order() -> None:
    scores = torch.tensor([[9.0, 1.0, 3.0, 3.0, 3.0, 2.0], [0.0, 5.0, 1.0, 4.0, 3.0, 2.0]])
    indices = kept_indices(scores, 1, 3)
    assert indices.tolist() == [[0, 2, 3, 4], [0, 1, 3, 4]]
    tokens = torch.arange(2 * 6 * 2).reshape(2, 6, 2)
    assert torch.equal(taken(tokens, indices)[1], tokens[1, [0, 1, 3, 4]])


class Bare(nn.Module):
    """An attention of one's own."""

    def __init__(self, causal: bool = False, times: int = 1) -> None:
        super().__init__()
        self.causal, self.times = causal, times

    def forward(self, tokens: Tensor) -> Tensor:
        each = tokens[:, None]
        for _ in range(self.times):
            each = nn.functional.scaled_dot_product_attention(
                each, each, each, is_causal=self.causal
            )
        return each[:, 0]


@pytest.mark.parametrize(("block", "words"), [
    (nn.Sequential(Bare(causal=True)), "masked"), (nn.Sequential(Bare(times=0)), "0 attentions"),
    (nn.Sequential(Bare(times=2)), "2 attentions"),
])  # fmt: skip
def test_what_is_not_certain_is_refused(block: nn.Module, words: str) -> None:
    fast = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(PlanError, match=words), dropping(block, "0", 1, lambda count: 1):
        block(torch.randn(2, 5, 4))
    assert "forward" not in block[0].__dict__ and torch.backends.mha.get_fastpath_enabled() == fast


def test_fewer_keys_than_queries_are_shared_by_heads() -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    with ClassRows(1) as rows:
        nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True, scale=0.5)
    shared = key.repeat_interleave(2, 1)
    by_hand = (query @ shared.transpose(2, 3) * 0.5).softmax(3)[:, :, 0].mean(1)
    torch.testing.assert_close(rows.scores(5), by_hand)
