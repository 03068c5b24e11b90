"""Layers that have no operation for channels or filters are not offered any."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from slow_ones import slow_unless
from small_models import loss_fn, sgd
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError
from fl_elastic.planning.channel_modes import channel_modes, has_operations
from fl_elastic.profiling import estimate_profile
from fl_elastic.training import ElasticTrainer


class Mean(nn.Module):
    """The mean over all places."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep batch and channels."""
        return x.flatten(2).mean(2)


class Twice(nn.Module):
    """A convolution that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Call it twice."""
        return self.conv(torch.relu(self.conv(x)))  # type: ignore[no-any-return]


def _circular() -> nn.Module:
    return nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")


ODD: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "twice": (Twice, 2),
    "transposed": (lambda: nn.ConvTranspose2d(8, 8, 3), 2),
    "one dimension": (lambda: nn.Conv1d(8, 8, 3), 1),
    "three dimensions": (lambda: nn.Conv3d(8, 8, 3), 3),
    "weight norm": (lambda: weight_norm(nn.Conv2d(8, 8, 3)), 2),
    "circular": (_circular, 2),
}


def odd_net(name: str, *more: nn.Module) -> nn.Module:
    return nn.Sequential(ODD[name][0](), *more, nn.ReLU(), Mean(), nn.Linear(8, 3))


def batches(name: str, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (6, 8, *[6] * ODD[name][1])
    return [
        (torch.randn(shape, generator=generator), torch.randint(3, (6,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize("memory", [None, 1e6])
@pytest.mark.parametrize("name", ODD)
def test_filtering_refuses_a_model_whose_convolutions_cannot_be_filtered(
    name: str, memory: float | None
) -> None:
    trainer = ElasticTrainer(
        odd_net(name), loss_fn, sgd, budget=Budget(memory=memory), policy="gradient_filter"
    )
    with pytest.raises(
        PlanError, match=r"'gradient_filter' filters the last.*use policy 'elastic'"
    ):
        trainer.fit(batches(name))


@pytest.mark.parametrize("name", [name for name, (_, axes) in ODD.items() if axes == 2])
def test_filtering_passes_over_what_cannot_be_filtered(name: str) -> None:
    model = odd_net(name, nn.ReLU(), nn.Conv2d(8, 8, 3))
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="gradient_filter")
    modes = [str(mode) for mode in trainer.fit(batches(name)).plan.modes]
    assert modes[:2] == ["full", "wx2"] and set(modes[2:]) == {"frozen"}


@pytest.mark.parametrize("name", ODD)
def test_no_channels_are_offered_of_what_cannot_be_trained_by_them(name: str) -> None:
    model = odd_net(name)
    profile = estimate_profile(model, loss_fn, batches(name)[0], optimizer_fn=sgd)
    assert has_operations(profile, profile.graph.head)
    for group in range(1, len(profile)):
        assert not has_operations(profile, group)
        for axis in ("in", "out"):
            assert len(channel_modes(profile, axis).get(group, ())) <= 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "policy"),
    slow_unless(
        lambda memory, policy: bool(memory) != (policy == "joint"),
        product([None, 1e5], ["tinytrain", "tinytrain_in", "sparse_update", "joint"]),
    ),
)
@pytest.mark.parametrize("name", ODD)
def test_other_policies_train_such_models(name: str, policy: str, memory: float | None) -> None:
    trainer = ElasticTrainer(
        odd_net(name), loss_fn, sgd, budget=Budget(memory=memory, uplink=1_700.0), policy=policy
    )
    modes = trainer.fit(batches(name)).plan.modes
    assert {mode.kind for mode in modes} <= {"full", "frozen", "bias"}


def test_a_linear_layer_with_a_computed_weight_has_no_channels() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 3))
    data = [(torch.randn(6, 16), torch.randint(3, (6,))) for _ in range(3)]
    budget = Budget(uplink=600.0)
    for policy in ("tinytrain", "tinytrain_in", "sparse_update", "joint"):
        trainer = ElasticTrainer(model, loss_fn, sgd, budget=budget, policy=policy)
        assert {mode.kind for mode in trainer.fit(data).plan.modes} <= {"full", "frozen", "bias"}
