"""Published schemes on their models, their rule on others, and the search for new ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from published_nets import chain_of, graph_of, made_up_costs
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.methods.sparse_update.policy import (
    SparseUpdatePolicy,
    published_model,
    scheme_modes,
)
from fl_elastic.methods.sparse_update.published_schemes import (
    PUBLISHED_MODELS,
    PublishedModel,
    Scheme,
)
from fl_elastic.planning import POLICIES, PlanRequest
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.layer_shapes import group_layers
from fl_elastic.testing import made_up_profile


def profile_of(graph: BackwardGraph, shape: tuple[int, ...] = (1, 3, 128, 128)) -> CostProfile:
    """Every node costs a second each way and keeps what it puts out."""
    return made_up_costs(graph, shape, np.ones, 0.0)


def request_of(profile: CostProfile, budget: Budget) -> PlanRequest:
    return PlanRequest(profile, budget, np.zeros(len(profile)))


@pytest.fixture(scope="module", params=PUBLISHED_MODELS, ids=lambda model: model.name)
def published(request: Any) -> tuple[PublishedModel, CostProfile]:
    return request.param, profile_of(graph_of(chain_of(request.param.layers)))


def test_a_traced_model_has_the_published_shapes(
    published: tuple[PublishedModel, CostProfile],
) -> None:
    model, profile = published
    found = [*reversed(group_layers(profile.graph, profile.key.batch_shape).values())]
    assert [replace(layer, name="") for layer in found[:-1]] == [
        replace(layer, name="") for layer in model.layers
    ]
    assert found[-1].in_channels == model.layers[-1].out_channels
    assert published_model(profile.graph) is model


def test_each_published_plan_trains_what_its_scheme_says(
    published: tuple[PublishedModel, CostProfile],
) -> None:
    model, profile = published
    for scheme in model.schemes:
        modes = scheme_modes(profile, scheme)
        layers = modes[::-1]
        assert layers[-1] == Mode.FULL
        for index, share in scheme.weights:
            assert layers[index] == (Mode.FULL if share == 1 else Mode.channels(share, "in"))
        trained = [index for index, mode in enumerate(layers[:-1]) if not mode.is_frozen]
        assert trained == list(range(len(layers) - 1 - scheme.bias_layers, len(layers) - 1))


def test_the_largest_scheme_that_fits_is_taken(
    published: tuple[PublishedModel, CostProfile],
) -> None:
    model, profile = published
    free = request_of(profile, Budget())
    plans = [scheme_modes(profile, scheme) for scheme in model.schemes]
    assert list(POLICIES.make("sparse_update").plan(free).modes) == plans[-1]
    for modes in plans:
        budget = Budget(uplink=free.uplink_bytes(modes))
        found = POLICIES.make("sparse_update").plan(request_of(profile, budget))
        best = max(
            (i for i, other in enumerate(plans) if free.uplink_bytes(other) <= budget.uplink),  # type: ignore[operator]
        )
        assert list(found.modes) == plans[best]
    tight = POLICIES.make("sparse_update").plan(request_of(profile, Budget(speedup=1000.0)))
    assert np.flatnonzero(tight.mask).tolist() == [0]


def test_a_norm_is_trained_in_place_of_a_bias() -> None:
    model = PUBLISHED_MODELS[1]
    profile = profile_of(graph_of(chain_of(model.layers[:2] + model.layers[2:4], norms=True)))
    names = profile.group_names
    assert names == ("14", "10", "9", "7", "6", "4", "3", "1", "0")
    modes = dict(zip(names, scheme_modes(profile, Scheme(2, ((2, 0.5),))), strict=True))
    assert modes["10"] == modes["7"] == modes["14"] == Mode.FULL
    assert modes["6"] == Mode.channels(1 / 2) and modes["9"] == Mode.FROZEN
    assert modes["4"] == modes["3"] == modes["1"] == modes["0"] == Mode.FROZEN


def test_a_model_with_norms_is_recognised_and_another_is_not() -> None:
    layers = PUBLISHED_MODELS[0].layers
    assert published_model(graph_of(chain_of(layers, norms=True))) is PUBLISHED_MODELS[0]
    assert published_model(graph_of(chain_of(layers[:-1]))) is None
    assert published_model(made_up_profile().graph) is None


def other_model() -> CostProfile:
    """The blocks of a published model without its last one, so that no scheme is known."""
    return profile_of(graph_of(chain_of(PUBLISHED_MODELS[1].layers[:-3])))


def test_the_transferred_rule_trains_widening_layers_of_the_later_half() -> None:
    profile = other_model()
    layers = [*reversed(group_layers(profile.graph, profile.key.batch_shape).values())][:-1]
    modes = POLICIES.make("sparse_update").plan(request_of(profile, Budget())).modes[::-1][:-1]
    weights = [i for i, mode in enumerate(modes) if mode.kind in ("full", "channels")]
    half = len(layers) // 2
    assert weights == [
        i for i in range(half, len(layers)) if layers[i].kernel == (1, 1)
        and layers[i].groups == 1 and layers[i].out_channels > layers[i].in_channels
    ]  # fmt: skip
    assert all(modes[i] == Mode.BIAS for i in range(weights[0], len(modes)) if i not in weights)
    assert all(mode.is_frozen for mode in modes[: weights[0]])


def test_the_transferred_rule_takes_shares_of_channels_where_memory_is_short() -> None:
    profile = other_model()
    free = POLICIES.make("sparse_update").plan(request_of(profile, Budget(memory=1e12)))
    seen: set[str] = set()
    trained = []
    for share in (1.0, 0.5, 0.25, 0.12):
        budget = Budget(memory=free.predicted_step_bytes * share)
        plan = POLICIES.make("sparse_update").plan(request_of(profile, budget))
        assert budget.memory is not None and plan.predicted_step_bytes <= budget.memory
        seen |= {mode.kind for mode in plan.modes}
        trained.append(sum(m.fraction for m in plan.modes if m.kind in ("full", "channels")))
    assert "channels" in seen
    assert trained == sorted(trained, reverse=True) and trained[-1] > 1


def test_residual_networks_train_dense_layers_and_no_shortcut() -> None:
    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, 2, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1)
            )
            self.short = nn.Conv2d(inputs, outputs, 1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.relu(self.body(x) + self.short(x))
            return out

    model = nn.Sequential(
        Block(3, 4), Block(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    profile = profile_of(graph_of(model, 16), (1, 3, 16, 16))
    plan = POLICIES.make("sparse_update").plan(request_of(profile, Budget()))
    kinds = {name: mode.kind for name, mode in zip(profile.group_names, plan.modes, strict=True)}
    assert {name for name, kind in kinds.items() if kind == "full"} == {"4", "1.body.0", "1.body.2"}
    assert kinds["1.short"] == "bias" and kinds["0.body.0"] == "frozen"


def test_a_scheme_of_ones_own_is_followed() -> None:
    mine = SparseUpdatePolicy(Scheme(3, ((40, 0.25),)))
    profile = profile_of(graph_of(chain_of(PUBLISHED_MODELS[1].layers)))
    plan = mine.plan(request_of(profile, Budget()))
    assert [str(mode) for mode in plan.modes[:5]] == ["full", "bias", "in/4", "bias", "frozen"]
