"""Which blocks to recompute: the quickest set that fits, of all there are."""

from __future__ import annotations

from itertools import chain as joined
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import Block
from fl_elastic.planning.recompute import (
    candidate_blocks,
    cheapest_recomputation,
    least_memory,
)
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.memory import recompute_seconds, step_memory


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(x + self.second(torch.relu(self.first(x))))
        return out


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *(Residual(8) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    batch = torch.randn(4, 3, 12, 12), torch.tensor([0, 1, 2, 0])
    return profile_model(model, cross_entropy, batch, clock="cpu")


def test_blocks_do_not_overlap_and_none_is_most_of_the_model(profile: CostProfile) -> None:
    blocks = candidate_blocks(profile)
    assert [block.module for block in blocks] == ["4", "3", "2", "1"]
    nodes = list(joined.from_iterable(block.nodes for block in blocks))
    assert len(nodes) == len(set(nodes))


@pytest.mark.parametrize("share", [0.95, 0.8, 0.7, 0.6, 0.55, 0.5, 0.4])
@pytest.mark.parametrize("lean", [False, True])
def test_the_quickest_set_that_fits_is_found(
    profile: CostProfile, lean: bool, share: float
) -> None:
    modes = [Mode.FULL] * len(profile)
    limit = share * step_memory(profile, modes, lean=lean).total
    blocks = candidate_blocks(profile)

    def cost(chosen: tuple[Block, ...]) -> float:
        return sum(recompute_seconds(profile, block) for block in chosen)

    sets = joined.from_iterable(combinations(blocks, n) for n in range(len(blocks) + 1))
    fitting = [
        cost(chosen) for chosen in sets
        if step_memory(profile, modes, lean=lean, recomputed=chosen).total <= limit
    ]  # fmt: skip
    found = cheapest_recomputation(profile, modes, limit, lean=lean)
    if not fitting:
        assert found is None and least_memory(profile, modes, lean=lean) > limit
    else:
        assert found is not None and found.bytes <= limit
        kept = step_memory(profile, modes, lean=lean, recomputed=found.blocks).total
        assert kept <= limit
        assert found.seconds == pytest.approx(min(fitting))


def test_recomputing_costs_the_forward_pass_of_the_block(profile: CostProfile) -> None:
    seconds = [recompute_seconds(profile, block) for block in candidate_blocks(profile)]
    assert all(second > 0 for second in seconds)
    assert sum(seconds) <= profile.cut_plain_seconds[0]
    everything = np.ones(len(profile), dtype=bool)
    assert sum(seconds) < profile.step_seconds(everything)
