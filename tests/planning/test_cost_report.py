"""What a plan costs in every unit, against sums written out by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, PlanError
from fl_elastic.groups import Mode
from fl_elastic.planning import POLICIES, PlanRequest, policies
from fl_elastic.planning.cost_report import (
    check_feasible,
    cost_report,
    forward_working_bytes,
)
from fl_elastic.planning.recompute import Recomputation
from fl_elastic.planning.step_transform import StepCase
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.memory import step_memory
from fl_elastic.testing import made_up_profile

BATCH = 2


class Blocks(nn.Module):
    """Two blocks that can be recomputed, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.two = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.two(self.one(x))))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    torch.manual_seed(0)
    batch = torch.randn(BATCH, 3, 6, 6), torch.randint(0, 5, (BATCH,))
    return profile_model(
        Blocks(), nn.functional.cross_entropy, batch,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )  # fmt: skip


def asking(profile: CostProfile, **limits: float) -> PlanRequest:
    return PlanRequest(profile, Budget(**limits), np.ones(len(profile)))


def modes_of(profile: CostProfile, **named: Mode) -> list[Mode]:
    chosen = {name.replace("_", "."): mode for name, mode in named.items()}
    return [chosen.get(name, Mode.FROZEN) for name in profile.group_names]


# Multiply-adds of a forward pass: two examples of 6 x 6 pixels.
MACS = {
    "one.0": BATCH * 36 * 4 * 3 * 9,
    "one.2": BATCH * 36 * 4 * 4,
    "two.0": BATCH * 36 * 8 * 4 * 9,
    "two.2": BATCH * 36 * 8 * 8,
    "head": BATCH * 8 * 5,
}
WEIGHTS = {"one.0": 112, "one.2": 20, "two.0": 296, "two.2": 72, "head": 45}


def test_bytes_and_multiply_adds_of_a_plan_by_hand(profile: CostProfile) -> None:
    request = asking(profile)
    modes = modes_of(profile, head=Mode.FULL, two_0=Mode.FULL)
    report = cost_report(request, request.plan("mine", modes))
    assert (report.policy, report.groups, report.recomputed) == ("mine", 2, 0)
    assert report.depth == profile.group_names.index("two.0")
    # To the head's and the last two convolutions' inputs, and the gradients of the two that train.
    assert report.backward_macs == MACS["head"] + MACS["two.2"] + MACS["head"] + MACS["two.0"]
    trained = 4 * (WEIGHTS["head"] + WEIGHTS["two.0"])
    assert report.uplink_bytes == trained
    # Gradients, and momentum of the same size.
    assert report.backward_bytes == pytest.approx(report.activation_bytes + 2 * trained)
    weights = 4 * sum(WEIGHTS.values())
    # The largest operation reads and writes eight channels.
    working = 4 * BATCH * 36 * (8 + 8)
    total = step_memory(profile, modes).total
    assert report.peak_bytes == pytest.approx(total + weights + working)
    # Kept at the least: the head's features, the input of two.0, and a bit per output of its ReLU.
    least = 4 * BATCH * 8 + 4 * BATCH * 36 * 4 + BATCH * 36 * 8 / 8
    assert least <= report.least_activation_bytes < 1.2 * least + 4 * BATCH * 8 * 5
    assert report.least_activation_bytes < report.activation_bytes
    assert report.predicted_speedup == pytest.approx(
        profile.full_step_seconds / report.predicted_step_seconds
    )


def test_uplink_goes_by_mode(profile: CostProfile) -> None:
    request = asking(profile)
    modes = modes_of(profile, head=Mode.FULL, two_0=Mode.channels(0.25), two_2=Mode.BIAS)
    report = cost_report(request, request.plan("mine", modes))
    # The head, one of four input channels with the bias, and a bias.
    assert report.uplink_bytes == 4 * (45 + (8 * 1 * 9 + 8) + 8)


def test_a_recomputed_block_keeps_less_and_multiplies_more(profile: CostProfile) -> None:
    request = asking(profile)
    everything = [Mode.FULL] * len(profile)
    plain = cost_report(request, request.plan("mine", everything))
    blocks = [block for block in profile.graph.blocks if block.module == "two"]
    again = cost_report(request, request.plan("mine", everything, blocks))
    assert again.recomputed == 1
    assert again.backward_macs == plain.backward_macs + MACS["two.0"] + MACS["two.2"]
    assert again.predicted_step_seconds >= plain.predicted_step_seconds
    assert again.least_activation_bytes <= again.activation_bytes


def test_an_unknown_block_is_refused(profile: CostProfile) -> None:
    with pytest.raises(PlanError, match="'three'"):
        Recomputation(("three",)).case(StepCase(profile))


def test_the_step_share_is_the_plans(profile: CostProfile) -> None:
    request = asking(profile, speedup=100.0)
    plan = POLICIES.make("full").plan(request)
    report = cost_report(request, plan)
    assert report.step_fraction == plan.step_fraction == pytest.approx(0.01)


@pytest.mark.parametrize("name", policies())
def test_every_policy_has_a_report(name: str, profile: CostProfile) -> None:
    request = asking(profile, speedup=1.5)
    report = cost_report(request, POLICIES.make(name).plan(request))
    assert report.policy == name
    assert 0 < report.least_activation_bytes <= report.activation_bytes
    assert report.activation_bytes < report.backward_bytes < report.peak_bytes
    assert report.backward_macs > 0 and report.uplink_bytes > 0


def test_unknown_shapes_count_as_nothing() -> None:
    profile = made_up_profile(groups=4)
    request = asking(profile)
    report = cost_report(request, request.plan_of_mask("mine", np.ones(4, dtype=bool)))
    assert forward_working_bytes(profile.graph) == 0
    assert report.backward_macs == 0
    assert report.peak_bytes == report.backward_bytes + profile.parameter_bytes.sum()


def test_the_first_layer_reads_the_models_input(profile: CostProfile) -> None:
    wide = replace(profile.key, batch_shape=(BATCH, 3, 600, 600)).batch_shape
    assert forward_working_bytes(profile.graph, wide) == 4 * BATCH * (3 * 600**2 + 36 * 4)


@pytest.mark.parametrize("limit", ["memory", "uplink"])
def test_what_nobody_can_meet_names_what_would_do(limit: str, profile: CostProfile) -> None:
    with pytest.raises(BudgetError, match=f"no policy can meet .*{limit}") as refused:
        check_feasible(asking(profile, **{limit: 3.0}))
    named = int(re.findall(r"takes (\d+)", str(refused.value))[0])
    enough = asking(profile, **{limit: float(named)})
    check_feasible(enough)
    assert POLICIES.make("head").plan(enough).mask.sum() == 1
    with pytest.raises(BudgetError):
        check_feasible(asking(profile, **{limit: math.nextafter(named - 1, 0)}))
