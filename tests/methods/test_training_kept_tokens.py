"""Training on kept tokens, against a loop that feeds them by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import assert_weights
from small_models import chain, sgd, vectors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from trainer_settings import settings_of
from vision_transformers import (
    DEPTH,
    class_loss,
    of_timm,
    of_torchvision,
    of_transformers,
    small_images,
    vision_transformer,
)

from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError
from fl_elastic.groups.trace import trace_step
from fl_elastic.methods.tokens.blocks import fewer_tokens_profile, token_blocks
from fl_elastic.methods.tokens.kept import KeptTokens, on_kept_tokens
from fl_elastic.methods.tokens.policy import BsrPolicy, EVitPolicy
from fl_elastic.planning import Plan
from fl_elastic.profiling import profile_model
from fl_elastic.state.rows import room_of
from fl_elastic.training import (
    ElasticTrainer,
    ForwardOptions,
    apply_plan,
    evaluate,
    plan_for,
)
from fl_elastic.training.elastic_forward import ElasticForward

NAMES = ["torchvision", "timm", "transformers", "distilled"]
LAST_FROZEN = {"torchvision": "encoder.layers.encoder_layer_1", "transformers": "vit.layers.1"}


def trainer_of(model: nn.Module, policy: Any = None, **options: Any) -> ElasticTrainer:
    budget = options.pop("budget", Budget())
    return ElasticTrainer(
        model, class_loss, sgd, budget=budget, policy=policy or BsrPolicy(),
        **settings_of(closed_loop=False, **options),
    )  # fmt: skip


def kept_outputs(model: nn.Module, block: str, images: Tensor, classes: int) -> Tensor:
    """What a block hands on: by attention of single examples, written out from its probabilities."""
    seen: list[Tensor] = []
    module = model.get_submodule(block)
    handle = module.register_forward_hook(lambda *given: seen.append(given[2]))
    with torch.no_grad(), KeptTokens(((block, 0.5),), classes).dropping(model):
        for image in images:
            model(image[None])
    handle.remove()
    return torch.cat(seen)


def slow_training(
    model: nn.Module, block: str, classes: int, names: set[str], epochs: int
) -> dict[str, Tensor]:
    """Train on what the frozen part, in eval mode, hands on of each example once, and nothing else."""
    data = small_images(3)
    model.eval()
    features = [kept_outputs(model, block, images, classes) for images, _ in data]
    model.train()
    optimizer = sgd(p for n, p in model.named_parameters() if n in names)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name in names)
    for _ in range(epochs):
        for (images, targets), given in zip(data, features, strict=True):
            hook = model.get_submodule(block).register_forward_hook(lambda *_, given=given: given)
            optimizer.zero_grad()
            class_loss(model(images), targets).backward()
            optimizer.step()
            hook.remove()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kept", [0, 1 << 24])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_the_suffix_on_the_kept_tokens(name: str, kept: int) -> None:
    model = vision_transformer(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    forward = ForwardOptions(feature_bytes=kept, precision="fp32") if kept else None
    trainer = trainer_of(model, forward=forward)
    report = trainer.fit(small_images(3), epochs=2)
    block, classes = LAST_FROZEN.get(name, "blocks.1"), 2 if name == "distilled" else 1
    assert report.plan.transform(KeptTokens) == KeptTokens(((block, 0.5),), classes)
    names = set(report.plan.trained_parameters)
    assert report.forward is not None and not report.forward.refused
    assert report.forward.found == (12 if kept else 0)
    # Of each example the kept tokens alone are stored.
    row = room_of(1 + (classes + 8) * 16 * 4, 2**14)
    assert report.forward.feature_bytes == (12 * row if kept else 0)
    slow = slow_training(vision_transformer(name), block, classes, names, epochs=2)
    assert 0 < len(names) < len(before)
    for parameter, now in model.named_parameters():
        torch.testing.assert_close(now.detach(), slow[parameter], rtol=1e-4, atol=1e-5)
        assert torch.equal(now, before[parameter]) == (parameter not in names), parameter


def test_the_same_tokens_stay_in_every_epoch_though_the_model_drops_at_random() -> None:
    torch.manual_seed(0)
    model = of_torchvision(dropout=0.3, attention_dropout=0.3)
    seen: dict[int, list[Tensor]] = {}
    batch = small_images(1)[0]

    def note(module: nn.Module, given: Any, out: Tensor) -> None:
        if torch.is_grad_enabled() and out.shape[1] == 9:
            seen.setdefault(0, []).append(out.detach().clone())

    handle = model.get_submodule("encoder.layers.encoder_layer_1").register_forward_hook(note)
    report = trainer_of(model).fit([batch], epochs=4)
    handle.remove()
    assert report.steps == 4 and len(seen[0]) == 4, len(seen[0])
    assert all(torch.equal(each, seen[0][0]) for each in seen[0])


def test_features_of_other_tokens_are_never_found(tmp_path: Path) -> None:
    found = []
    for keep in (0.5, 0.5, 0.25):
        forward = ForwardOptions(feature_bytes=1 << 24, path=tmp_path / "features")
        report = trainer_of(vision_transformer("timm"), BsrPolicy(keep), forward=forward).fit(
            small_images(2)
        )
        assert report.forward is not None
        found.append((report.forward.found, report.forward.computed))
    assert found == [(0, 8), (8, 0), (0, 8)]


def test_a_tighter_budget_trains_fewer_blocks_and_the_head_alone_in_the_end() -> None:
    model = vision_transformer("timm")
    profile = profile_model(model, class_loss, small_images()[0], optimizer_fn=sgd)
    blocks = token_blocks(profile.graph)

    def planned(speedup: float, fraction: float) -> Plan:
        policy, data = BsrPolicy(fraction=fraction), small_images()
        budget = Budget(speedup=speedup)
        return plan_for(
            model, class_loss, data, budget=budget, policy=policy, profile=profile, optimizer_fn=sgd
        )

    for count in (3, 2, 1):
        most = planned(1.0, count / DEPTH)
        assert (
            most.depth == blocks[DEPTH - count - 1].groups_above - 1
            and most.transform(KeptTokens) is not None
        )
        speedup = profile.full_step_seconds / most.predicted_step_seconds
        assert planned(speedup * 0.999, 1.0).modes == most.modes
        assert planned(speedup * 1.001, 1.0).mask.sum() < most.mask.sum()
    head = planned(1000.0, 1.0)
    assert (
        head.transform(KeptTokens) is None
        and head.mask.sum() == 1
        and head.depth == profile.graph.head
    )


def test_fewer_tokens_cost_their_share_and_attention_its_square() -> None:
    profile = profile_model(vision_transformer("timm"), class_loss, small_images()[0])
    block = token_blocks(profile.graph)[1]
    fewer = fewer_tokens_profile(profile, [(block, 9)])
    share = fewer.node_update_seconds + fewer.node_path_seconds
    share = share / np.maximum(profile.node_update_seconds + profile.node_path_seconds, 1e-12)
    for index, node in enumerate(profile.graph.nodes):
        if share[index] == 0:
            continue
        below = index >= block.node
        attends = node.name.startswith("ScaledDot")
        on_tokens = 17 in node.shape[1:] or node.shape[:1] == (4 * 17,)
        expected = 1.0 if below or not on_tokens else 9 / 17
        assert share[index] == pytest.approx(expected**2 if attends and not below else expected)
    assert (fewer.forward_seconds < profile.forward_seconds).all()
    assert (fewer.node_saved_bytes <= profile.node_saved_bytes).all()
    two = fewer_tokens_profile(profile, [(block, 9), (token_blocks(profile.graph)[2], 5)])
    assert two.full_step_seconds < fewer.full_step_seconds < profile.full_step_seconds


def test_a_loop_of_ones_own_and_evaluation_see_the_kept_tokens() -> None:
    model = vision_transformer("timm")
    data = small_images(2)
    plan = plan_for(model, class_loss, data, budget=Budget(), policy="bsr")
    shapes: list[int] = []
    handle = model.get_submodule("blocks.3").register_forward_hook(
        lambda *given: shapes.append(given[2].shape[1])
    )
    whole = evaluate(model, class_loss, data)
    with on_kept_tokens(model, plan):
        kept = evaluate(model, class_loss, data)
    with apply_plan(model, plan):
        class_loss(model(data[0][0]), data[0][1]).backward()
    model(data[0][0])
    handle.remove()
    assert shapes == [17, 17, 9, 9, 9, 17]
    assert whole.loss != kept.loss
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == set(plan.trained_parameters)


class PlacesInEveryBlock(nn.Module):
    """A block that adds to each token what stands for its place."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(17, 16)) if fixed else None
        self.mix = nn.Linear(16, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        places = (
            torch.arange(count, dtype=tokens.dtype)[:, None] if self.places is None else self.places
        )
        three = self.mix(tokens + places)[:, None].split(16, 3)
        return tokens + nn.functional.scaled_dot_product_attention(*three)[:, 0]


class OfBlocks(nn.Module):
    """Tokens of 17 x 16 through blocks, and a head on the first."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.Sequential(make(), make(), make())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.embed(x))[:, 0])
        return out


@pytest.mark.parametrize(("make", "words"), [
    (lambda: OfBlocks(lambda: PlacesInEveryBlock(fixed=False)), "depend on the tokens' positions"),
    (lambda: OfBlocks(lambda: PlacesInEveryBlock(fixed=True)), "depend on the tokens' positions"),
])  # fmt: skip
def test_models_that_see_places_above_are_refused(make: Any, words: str) -> None:
    batch = torch.randn(4, 17, 16), torch.tensor([0, 1, 2, 0])
    with pytest.raises(PlanError, match=words):
        trainer_of(make()).fit([batch])


@pytest.mark.parametrize("seed", range(6))
def test_models_of_few_bits_are_judged_as_others(seed: int) -> None:
    """Rounding in every block is no sign of places."""
    torch.manual_seed(seed)
    model = of_transformers().bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    batches = [(x.bfloat16(), y) for x, y in small_images(seed=seed)]
    assert trainer_of(model).fit(batches).plan.transform(KeptTokens) is not None
    with pytest.raises(PlanError, match="depend on the tokens' positions"):
        blocks = OfBlocks(lambda: PlacesInEveryBlock(fixed=True)).bfloat16()
        trainer_of(blocks).fit([(torch.randn(4, 17, 16).bfloat16(), torch.tensor([0, 1, 2, 0]))])


def test_models_without_a_class_token_or_blocks_are_refused_and_left_alone() -> None:
    model = of_timm(global_pool="avg")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(PlanError, match="depend on all tokens of its last block"):
        trainer_of(model).fit(small_images())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(PlanError, match="0 blocks were found"):
        ElasticTrainer(chain(), cross_entropy, sgd, budget=Budget(), policy="bsr").fit(vectors())


@pytest.mark.parametrize(("keep", "fraction"), [(0.0, 0.5), (0.5, 0.0), (1.1, 0.5), (0.5, 1.5)])
def test_impossible_shares_are_refused(keep: float, fraction: float) -> None:
    with pytest.raises(PlanError, match="above 0"):
        BsrPolicy(keep, fraction)


def test_a_chain_of_blocks_is_found_in_the_test_model() -> None:
    model = vision_transformer("timm")
    assert len(token_blocks(trace_step(model, class_loss, small_images()[0]).graph)) == DEPTH


def test_e_vit_leaves_tokens_out_behind_three_blocks_in_training() -> None:
    torch.manual_seed(0)
    model = of_timm(depth=12)
    shapes: list[int] = []
    handle = model.get_submodule("norm").register_forward_hook(
        lambda *given: shapes.append(given[2].shape[1])
    )
    trainer = trainer_of(model, EVitPolicy(0.5))
    report = trainer.fit(small_images(2))
    handle.remove()
    kept = report.plan.transform(KeptTokens)
    assert kept is not None and kept.drops == (
        ("blocks.3", 0.5),
        ("blocks.6", 0.5),
        ("blocks.9", 0.5),
    )
    assert kept.counts(17) == (9, 5, 3) and shapes[-2:] == [3, 3]
    assert report.plan.mask.all() and report.plan.predicted_speedup > 1
    assert report.forward is None


def test_e_vit_trains_as_the_model_whose_blocks_are_gathered_by_hand() -> None:
    model, slow = (vision_transformer("timm") for _ in range(2))
    data = small_images(2)
    report = trainer_of(model, EVitPolicy(0.5)).fit(data)
    assert report.plan.transform(KeptTokens) is not None
    assert [m for m, _ in report.plan.transform(KeptTokens).drops] == ["blocks.1", "blocks.2"]
    optimizer = sgd(slow.parameters())
    parts: Any = slow
    for images, targets in data:
        tokens = parts.norm_pre(parts.patch_drop(parts._pos_embed(parts.patch_embed(images))))
        for place, block in enumerate(parts.blocks):
            qkv = block.attn.qkv(block.norm1(tokens)).reshape(*tokens.shape[:2], 3, 2, 8)
            query, key = (qkv[:, :, each].transpose(1, 2) for each in (0, 1))
            row = (query @ key.transpose(2, 3) / 8**0.5).softmax(3)[:, :, 0].mean(1)
            tokens = block(tokens)
            if place in (1, 2):
                best = row[:, 1:].topk(-(-(tokens.shape[1] - 1) // 2)).indices + 1
                tokens = torch.stack(
                    [
                        each[[0, *sorted(chosen)]]
                        for each, chosen in zip(tokens, best.tolist(), strict=True)
                    ]
                )
        optimizer.zero_grad()
        class_loss(parts.head(parts.norm(tokens)[:, 0]), targets).backward()
        optimizer.step()
    assert_weights(model, slow, rtol=1e-3, atol=1e-5)


def test_above_the_fleets_cut_the_features_of_kept_tokens_last(tmp_path: Path) -> None:
    found = []
    for cut, block in (
        ("blocks.3", "blocks.2"),
        ("blocks.3", "blocks.2"),
        ("blocks.1", "blocks.1"),
    ):
        forward = ForwardOptions(feature_bytes=1 << 24, path=tmp_path / "features")
        model = vision_transformer("timm")
        report = trainer_of(model, forward=forward, cut=cut).fit(small_images(2))
        assert report.plan.transform(KeptTokens) is not None and report.forward is not None
        assert report.plan.transform(KeptTokens).drops == ((block, 0.5),)
        trained = {
            name.split(".")[1] for name in report.plan.trained_parameters if "blocks" in name
        }
        assert trained == ({"3"} if cut == "blocks.3" else {"2", "3"})
        found.append((report.forward.found, report.forward.cut, report.forward.feature_bytes))
    assert found[0][:2] == (0, "blocks.2") and found[1][:2] == (8, "blocks.2")
    # Below the fleet's deeper cut the features are of all tokens, as the last frozen block is above it.
    assert found[2][1] == "blocks.0" and found[2][2] > found[1][2] > 0


def test_what_is_frozen_does_not_drop_at_random_in_a_loop_of_ones_own() -> None:
    torch.manual_seed(0)
    model = of_torchvision(dropout=0.3, attention_dropout=0.3)
    data = small_images()
    plan = plan_for(model, class_loss, data, budget=Budget(), policy="bsr")
    modes = {name: module.training for name, module in model.named_modules()}
    with apply_plan(model, plan):
        model.train()
        now = {name for name, module in model.named_modules() if not module.training}
        assert {"conv_proj", "encoder.layers.encoder_layer_1.mlp.2"} <= now
        assert not any(name.startswith("encoder.layers.encoder_layer_2") for name in now)
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_plan_of_fewer_blocks_begins_with_features_of_its_own() -> None:
    model = vision_transformer("timm")
    batch = small_images()[0]
    graph = trace_step(model, class_loss, batch).graph
    blocks = token_blocks(graph)
    forward = ElasticForward(
        model, ForwardOptions(feature_bytes=1 << 24, precision="fp32"), examples=4, epochs=9,
        clock=time.perf_counter,
    )  # fmt: skip
    cuts = []
    for block in (blocks[0], blocks[2], blocks[2]):
        kept = KeptTokens(((block.module, 0.5),))
        with kept.dropping(model):
            alone = class_loss(model.eval()(batch[0]), batch[1])
            with forward.splitting(graph, block.groups_above - 1, batch, [kept]):
                with forward.step(batch):
                    torch.testing.assert_close(class_loss(model(batch[0]), batch[1]), alone)
        cuts.append((forward.report().cut, forward.report().computed, forward.report().found))
    forward.close()
    assert cuts == [("blocks.0", 4, 0), ("blocks.2", 8, 0), ("blocks.2", 8, 4)]
