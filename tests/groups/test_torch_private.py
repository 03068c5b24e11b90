"""What is done for older releases of torch, tried out on whichever is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from small_models import conv_net, flat_profile, images, loss_fn, sgd
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.groups import torch_private
from fl_elastic.groups.torch_private import number_of, recorded_allocations, spared_group_norms
from fl_elastic.groups.untouched import untouched
from fl_elastic.planning import POLICIES, PlanRequest
from fl_elastic.profiling import profile_model
from fl_elastic.training import ElasticTrainer, Timing, TrainablePart, TrainerOptions, apply_plan


def norm_alone(model: nn.Module) -> AbstractContextManager[object]:
    """Train the norm and what is above it."""
    profile = flat_profile(model, images()[0])
    request = PlanRequest(profile, Budget(), 1)
    return apply_plan(model, POLICIES.make("last_k").plan(request))


BLOCKS: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
    "by itself": spared_group_norms, "measured": untouched, "by a plan": norm_alone,
}  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("crashes", [True, False])
def test_a_group_norm_is_given_nothing_that_older_releases_crash_on(
    crashes: bool, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "_GROUP_NORM_CRASHES", crashes)
    model, seen = nn.Sequential(nn.GroupNorm(1, 3), *conv_net("group")), []

    def look(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].is_contiguous())

    last = images()[0][0].contiguous(memory_format=torch.channels_last)
    with BLOCKS[block](model):
        model[0].register_forward_pre_hook(look)
        model[0](last)
        # One whose gradient is asked for is not crashed on, and nor is one without a way back.
        model[0](last.clone(memory_format=torch.preserve_format).requires_grad_())
        with torch.no_grad():
            model[0](last)
    model[0](last)
    assert seen == [crashes, False, False, False]


@pytest.mark.parametrize("policy", ["elastic", "full", "head", "bias", "random"])
def test_group_norms_above_what_is_frozen_train_in_any_layout(policy: str) -> None:
    """Torch before 2.14 ends the process here if it is let."""
    model = conv_net("group").to(memory_format=torch.channels_last)
    batches = [
        (x.contiguous(memory_format=torch.channels_last), y) for x, y in images(3)
    ]  # fmt: skip
    profile = profile_model(model, loss_fn, batches[0], optimizer_fn=sgd)
    for cut in ("", *(group.name for group in profile.graph.groups)):
        trainer = ElasticTrainer(
            model, loss_fn, sgd, budget=Budget(), policy=policy, profile=profile,
            options=TrainerOptions(part=TrainablePart(cut=cut), timing=Timing(closed_loop=False)),
        )  # fmt: skip
        assert trainer.fit(batches).steps == 3


def test_allocations_are_recorded_between_the_operations_that_made_them() -> None:
    weight, x = torch.randn(300, 100, requires_grad=True), torch.randn(50, 100)
    with recorded_allocations() as events, recorded_allocations() as inside:
        product = x @ weight.t()
        number = number_of(product.grad_fn)
        product.sum().backward()
        weight.grad = None
        del product
    assert not inside
    sizes = [size for name, _, size in events if not name]
    # The product, and the gradient of the weight, which are freed again.
    assert {4 * 50 * 300, 4 * 300 * 100, -4 * 50 * 300, -4 * 300 * 100} <= set(sizes)
    assert sum(sizes) == 0
    named = [name for name, each, _ in events if each == number]
    assert named == ["aten::matmul", "aten::mm", "MmBackward0"]


@pytest.mark.parametrize("other", ["_enable_profiler_legacy", "ProfilerConfig", "ProfilerState"])
@pytest.mark.parametrize("missing", [False, True])
def test_in_a_torch_release_with_other_profilers_nothing_is_recorded(
    missing: bool, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_nothing() -> None:
        """Called with any argument it raises a TypeError; it has no attribute CPU."""

    if missing:
        monkeypatch.delattr(torch.autograd, other)
    else:
        monkeypatch.setattr(torch.autograd, other, takes_nothing)
    with recorded_allocations() as events:
        torch.zeros(100)
    assert events == []
