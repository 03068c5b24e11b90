"""The costs of a part of the model are those of the whole for every plan that stays within the part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import GRAPHS, loss_fn, sgd
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError
from fl_elastic.planning import POLICIES, PlanRequest
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.profiling.profile import trainable_part
from fl_elastic.testing import made_up_profile
from fl_elastic.training import ElasticTrainer, TrainablePart, TrainerOptions


@pytest.fixture(scope="module")
def profiles() -> dict[str, CostProfile]:
    torch.manual_seed(0)
    return {
        name: profile_model(make(), loss_fn, data(1)[0], optimizer_fn=sgd)
        for name, (make, data) in GRAPHS.items()
    }


@given(data=st.data())
@pytest.mark.parametrize("name", GRAPHS)
def test_every_plan_within_the_part_costs_what_it_costs_in_the_whole(
    name: str, profiles: dict[str, CostProfile], data: st.DataObject
) -> None:
    whole = profiles[name]
    place = data.draw(st.sampled_from(whole.group_names), label="cut below")
    above = whole.graph.groups_above(place)
    head = data.draw(st.sampled_from(["", whole.group_names[0]]), label="kept head")
    part = trainable_part(whole, above, head)
    expected = [n for n in whole.group_names[:above] if n != head] or list(whole.group_names)
    assert list(part.group_names) == expected
    chosen = data.draw(st.sets(st.sampled_from(expected), min_size=1), label="trained")
    in_part = np.array([n in chosen for n in part.group_names])
    in_whole = np.array([n in chosen for n in whole.group_names])
    assert math.isclose(part.step_seconds(in_part), whole.step_seconds(in_whole), rel_tol=1e-9)
    assert part.seconds_of(in_part[None])[0] == pytest.approx(whole.step_seconds(in_whole))
    for lean in (False, True):
        there = mask_bytes(whole, in_whole, lean=lean)
        assert mask_bytes(part, in_part, lean=lean) == pytest.approx(there)


@pytest.mark.parametrize(
    "policy", ["elastic", "full", "last_k", "head", "random", "joint", "gradient_filter"]
)
@pytest.mark.parametrize("kept_head", [False, True])
def test_every_policy_chooses_within_the_part(
    policy: str, kept_head: bool, profiles: dict[str, CostProfile]
) -> None:
    whole = profiles["convolutions"]
    above = whole.graph.groups_above("6")
    part = trainable_part(whole, above, whole.group_names[0] if kept_head else "")
    request = PlanRequest(part, Budget(speedup=1.5), np.ones(len(part)), steps=10)
    trained = POLICIES.make(policy).plan(request).trained_parameters
    assert trained and {name.partition(".")[0] for name in trained} <= {"6", "7", "11"}
    assert not (kept_head and any(name.startswith("11.") for name in trained))


def test_without_a_cut_or_a_head_it_is_the_same_profile() -> None:
    profile = made_up_profile(5, seed=1)
    assert trainable_part(profile) is profile
    assert trainable_part(profile, len(profile)) is profile


def test_a_head_that_is_everything_is_trained() -> None:
    profile = made_up_profile(5, seed=1)
    assert trainable_part(profile, 1, profile.group_names[0]) is profile


class WithLooseWeight(nn.Module):
    """What is left of a model whose head reads its input: the loss depends on the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, rows: torch.Tensor) -> Any:
        return self.head(rows)


def test_a_head_that_is_all_that_is_used_is_trained() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 6), torch.arange(8) % 3)]
    model = WithLooseWeight()
    profile = profile_model(model, nn.functional.cross_entropy, data[0], optimizer_fn=sgd)
    assert set(profile.group_names) == {"head", "scale"}
    assert trainable_part(profile, kept_head="head") is profile
    options = TrainerOptions(part=TrainablePart(kept_head="head"))
    trainer = ElasticTrainer(
        model, nn.functional.cross_entropy, sgd, budget=Budget(speedup=2), options=options
    )
    assert trainer.fit(data, epochs=6).steps


def test_a_place_that_is_not_there_is_named(profiles: dict[str, CostProfile]) -> None:
    with pytest.raises(PlanError, match="no group 'nowhere' to cut below"):
        profiles["chain"].graph.groups_above("nowhere")
