"""What a fit is told to leave alone stays as it is, and the rest trains as in a plain loop that freezes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loop import plain_steps
from slow_ones import slow_unless
from small_models import (
    Residual,
    chain,
    conv_net,
    flat_profile,
    images,
    loss_fn,
    sgd,
    vectors,
    weights_of,
)
from torch import nn
from vision_transformers import of_torchvision, small_images

from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError
from fl_elastic.groups import tensor_groups
from fl_elastic.groups.torch_private import NormWithStatistics
from fl_elastic.planning import POLICIES
from fl_elastic.planning.plain import GivenPolicy
from fl_elastic.training import (
    ElasticTrainer,
    ForwardOptions,
    Timing,
    TrainablePart,
    TrainerOptions,
)

TOKENS = ("bsr", "e_vit")

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "chain": (chain, vectors),
    "batch norms": (conv_net, images),
    "group norms": (lambda: conv_net("group"), images),
    "residual": (Residual, images),
}


def plainly(model: nn.Module, batches: Any, trained: set[str], *, kept_statistics: bool) -> None:
    """The slow way: freeze by hand, in one loop."""
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    for module in model.modules():
        frozen = not any(each.requires_grad for each in module.parameters(recurse=False))
        if isinstance(module, NormWithStatistics) and (kept_statistics or frozen):
            module.eval()
    optimizer = sgd([each for each in model.parameters() if each.requires_grad])
    plain_steps(model, optimizer, batches, loss_fn)


@pytest.mark.parametrize("name", slow_unless({"batch norms", "residual"}.__contains__, MODELS))
@pytest.mark.parametrize(
    ("kept_statistics", "kept_head", "forward"),
    [
        (False, False, None), (True, True, None), (True, False, ForwardOptions()),
        (False, True, ForwardOptions(feature_bytes=1 << 20, precision="fp32")),
        (True, False, ForwardOptions(feature_bytes=1 << 20, precision="fp32")),
    ],
)  # fmt: skip
def test_the_rest_trains_as_in_a_plain_loop(
    name: str, kept_statistics: bool, kept_head: bool, forward: ForwardOptions | None, tmp_path: Any
) -> None:
    make, data = MODELS[name]
    torch.manual_seed(1)
    start, batches = make(), data(4)
    groups = tensor_groups(start, loss_fn, batches[0])
    for place in (1, 2, len(groups) - 1):
        plain, elastic = copy.deepcopy(start), copy.deepcopy(start)
        if forward is not None and forward.feature_bytes:
            forward = ForwardOptions(1 << 20, "fp32", tmp_path / f"{place}.bin")
        trainer = ElasticTrainer(
            elastic.train(), loss_fn, sgd, budget=Budget(), policy="full",
            options=TrainerOptions(
                forward=forward, timing=Timing(closed_loop=False),
                part=TrainablePart(
                    groups[place].name, groups[0].name if kept_head else "", kept_statistics
                ),
            ),
        )  # fmt: skip
        trainer.fit(batches)
        above = trainer.profile.graph.groups_above(groups[place].name)  # type: ignore[union-attr]
        trained = {n for group in groups[int(kept_head) : above] for n in group.parameters}
        assert set(trainer.update().deltas) >= trained
        plainly(plain, batches, trained, kept_statistics=kept_statistics)
        expected = weights_of(plain)
        for key, value in weights_of(elastic).items():
            if value.is_floating_point():
                torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def test_norms_run_as_before_after_the_fit() -> None:
    model = conv_net().train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    trainer = ElasticTrainer(
        model,
        loss_fn,
        sgd,
        budget=Budget(),
        options=TrainerOptions(part=TrainablePart(keep_statistics=True)),
    )
    trainer.fit(images(3))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert all(module.training for module in model.modules())
    model.eval()
    assert not any(module.training for module in model.modules())


def test_a_speed_up_above_a_cut_is_still_over_full_training() -> None:
    # Everything above the cut takes less than half of a full step, so all of it is trained.
    model = conv_net()
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.1), profile=flat_profile(model, images(1)[0]),
        options=TrainerOptions(full_update_every=0, part=TrainablePart(cut="11"), timing=Timing(closed_loop=False)),
    )  # fmt: skip
    report = trainer.fit(images(6))
    assert set(trainer.update().steps) == {"11.weight", "11.bias"}
    assert report.steps == report.requested_steps


@pytest.mark.parametrize("policy", POLICIES.names())
def test_a_policy_with_nothing_to_choose_above_the_cut_trains_what_is_there(policy: str) -> None:
    make, batches = (of_torchvision, small_images(2)) if policy in TOKENS else (Residual, images(2))
    model = make()
    head = tensor_groups(model, loss_fn, batches[0])[0]
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(), policy=policy, profile=flat_profile(model, batches[0]),
        options=TrainerOptions(part=TrainablePart(cut=head.name), timing=Timing(closed_loop=False)),
    )  # fmt: skip
    trainer.fit(batches)
    assert set(trainer.update().deltas) == set(head.parameters)


@pytest.mark.parametrize(
    ("build", "cut", "policy", "words"),
    [
        (conv_net, "nowhere", "elastic", "no group 'nowhere'"),
        # With nothing to choose in the whole model.
        (lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 3)), "2", "tinytrain",
         "none besides its head"),
        # Groups that the server named are not replaced by others.
        (conv_net, "11", GivenPolicy(["4"]), r"groups \['4'\] that this model does not have"),
    ],
    ids=["no such group", "nothing to choose", "named by the server"],
)  # fmt: skip
def test_a_cut_above_which_the_policy_has_nothing_is_refused(
    build: Callable[[], nn.Module], cut: str, policy: Any, words: str
) -> None:
    trainer = ElasticTrainer(
        build(), loss_fn, sgd, budget=Budget(), policy=policy,
        options=TrainerOptions(part=TrainablePart(cut=cut)),
    )  # fmt: skip
    with pytest.raises(PlanError, match=words):
        trainer.fit(images(1))
