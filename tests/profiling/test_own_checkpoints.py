"""Models that run parts of themselves again: trained as without, memory never said to be less, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peak_bytes import peak_bytes
from small_models import sgd
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fl_elastic.budget import Budget
from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import compute_loss
from fl_elastic.planning import Plan, PlanRequest
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.estimate import estimate_profile
from fl_elastic.profiling.memory import step_memory
from fl_elastic.profiling.store import load_profile, save_profile
from fl_elastic.training import ElasticTrainer
from fl_elastic.training.apply_plan import plan_applied

Subject = tuple[nn.Module, LossFn, Batch]
WIDTH, BLOCKS, EXAMPLES = 64, 4, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return out


class Stack(nn.Module):
    """Blocks that are run again on the way back, or not."""

    def __init__(self, again: str) -> None:
        super().__init__()
        self.again = again
        self.stem = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.again == "never":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.again == "reentrant")  # type: ignore[no-untyped-call]
        out: Tensor = self.head(x)
        return out


def stack(again: str) -> Subject:
    torch.manual_seed(0)
    batch = torch.randn(EXAMPLES, 16), torch.arange(EXAMPLES) % 4
    return Stack(again).train(), functional.cross_entropy, batch


def gpt2(again: str) -> Subject:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    if again != "never":
        model.gradient_checkpointing_enable({"use_reentrant": again == "reentrant"})
    codes = torch.randint(0, 50, (8, 12))

    def next_word(outputs: Any, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        )

    return model, next_word, (codes, codes)


SUBJECTS = pytest.mark.parametrize("make", [stack, gpt2])


def plan_of(profile: CostProfile, groups: list[int]) -> Plan:
    mask = np.zeros(len(profile), dtype=bool)
    mask[groups] = True
    return PlanRequest(profile, Budget(), np.ones(len(profile))).plan_of_mask("these", mask)


def choices(profile: CostProfile) -> list[list[int]]:
    """The head, runs next to the loss, the middle alone, and everything."""
    last = len(profile)
    return [
        [0],
        [0, 1],
        list(range(last // 3)),
        list(range(last // 2)),
        [last // 2],
        list(range(last)),
    ]


@pytest.mark.slow
@SUBJECTS
def test_a_plan_trains_what_it_would_train_without(make: Callable[[str], Subject]) -> None:
    model, loss_fn, batch = make("again")
    profile = profile_model(model, loss_fn, batch, optimizer_fn=sgd)
    for groups in choices(profile):
        plan = plan_of(profile, groups)
        trained = {name for g in groups for name in profile.graph.groups[g].parameters}
        (model, _, _), (reference, _, _) = make("again"), make("never")
        for name, parameter in reference.named_parameters():
            parameter.requires_grad_(name in trained)
        with plan_applied(plan, model):
            for each in (model, reference):
                optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1)
                for _ in range(3):
                    optimizer.zero_grad()
                    compute_loss(each, loss_fn, batch).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
        start = make("never")[0].state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name])
            moved = not torch.equal(value, start[name])
            assert moved <= (name in trained or name == "lm_head.weight")
        assert any(not torch.equal(model.state_dict()[name], start[name]) for name in trained)


@pytest.mark.parametrize("measured", [True, False])
def test_a_step_takes_no_more_memory_than_is_said(measured: bool, tmp_path: Path) -> None:
    model, loss_fn, batch = stack("again")
    profile = (
        profile_model(model, loss_fn, batch, optimizer_fn=sgd)
        if measured
        else estimate_profile(model, loss_fn, batch, optimizer_fn=sgd, memory=1e9)
    )
    with torch.no_grad():
        compute_loss(model, loss_fn, batch)
        inference = peak_bytes(lambda: compute_loss(model, loss_fn, batch), tmp_path)
    # What a block runs again beside: its input, and the gradient of what it put out.
    beside = 2 * EXAMPLES * WIDTH * 4
    for groups in choices(profile):
        plan = plan_of(profile, groups)
        with plan_applied(plan, model):

            def step() -> None:
                compute_loss(model, loss_fn, batch).backward()  # type: ignore[no-untyped-call]

            step()
            model.zero_grad(set_to_none=True)
            taken = peak_bytes(step, tmp_path) - inference
            model.zero_grad(set_to_none=True)
        said = step_memory(profile, plan.modes).moment
        assert taken <= 1.01 * said + beside, (groups, taken, said)


@pytest.mark.parametrize("memory", [None, 1e9])
def test_what_was_learnt_of_a_new_model_fits_its_graph(
    memory: float | None, tmp_path: Path
) -> None:
    """The first call of a model copies its inputs, which was a node of the graph with blocks alone."""
    profile = estimate_profile(*stack("again"), optimizer_fn=sgd, memory=memory)
    loaded = load_profile(save_profile(profile, tmp_path / "costs"))
    assert loaded.graph == profile.graph


def test_a_block_that_runs_again_keeps_its_input_whichever_part_of_it_is_trained() -> None:
    model, loss_fn, batch = stack("again")
    known = profile_model(model, loss_fn, batch, optimizer_fn=sgd).saved
    plain, _, _ = stack("never")
    other = profile_model(plain, loss_fn, batch, optimizer_fn=sgd).saved
    assert known is not None and other is not None
    # The same tensors are kept by the same nodes, and the input of a block by all of its nodes as well.
    kept, without = (
        {
            (int(node), float(each.tensor_bytes[tensor]))
            for node, tensor in zip(each.nodes, each.tensors, strict=True)
            if each.tensor_bytes[tensor] > EXAMPLES * 16
        }
        for each in (known, other)
    )
    assert without < kept
    assert {size for _, size in kept - without} == {EXAMPLES * WIDTH * 4}


@SUBJECTS
@pytest.mark.parametrize("policy", ["full", "last_k", "joint"])
def test_the_reentrant_way_is_refused_and_nothing_changed(
    make: Callable[[str], Subject], policy: str
) -> None:
    model, loss_fn, batch = make("reentrant")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(speedup=1.5), policy=policy)
    with pytest.raises(ModelError, match="use_reentrant=False"):
        trainer.fit([batch, batch])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("holder", "missing"),
    [(torch.utils.checkpoint, "_checkpoint_hook"), (torch.utils, "checkpoint")],
)
def test_a_release_of_torch_that_checkpoints_by_other_means_is_no_hindrance(
    holder: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own name for them is private, and 2.6 loads the module only on request."""
    monkeypatch.delattr(holder, missing)
    inputs, targets = torch.randn(8, 16), torch.zeros(8, dtype=torch.long)
    profile = estimate_profile(
        Stack("never"), functional.cross_entropy, (inputs, targets), optimizer_fn=sgd
    )
    assert profile.full_step_seconds > 0
