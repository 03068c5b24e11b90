"""The policy of windows: how wide they are under a budget, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_models import (
    Attention,
    Heads,
    Residual,
    chain,
    conv_net,
    flat_profile,
    images,
    loss_fn,
    sgd,
    vectors,
)
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, PlanError
from fl_elastic.groups import Batch
from fl_elastic.groups.graph import Width
from fl_elastic.methods.windows.policy import SliceOutPolicy
from fl_elastic.methods.windows.windows import Windows, narrow_profile
from fl_elastic.planning import Plan, PlanRequest, PolicyMemory
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import step_memory
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions


def profile_of(kind: str = "conv") -> CostProfile:
    model, batch = (conv_net(), images()[0]) if kind == "conv" else (chain(), vectors()[0])
    return flat_profile(model, batch)


def windows_of(plan: Plan) -> Windows:
    found = plan.transform(Windows)
    assert found is not None
    return found


def plan_of(
    profile: CostProfile, budget: Budget, policy: SliceOutPolicy | None = None, **more: Any
) -> Plan:
    request = PlanRequest(profile, budget, np.zeros(len(profile)), **more)
    return (policy or SliceOutPolicy()).plan(request)


def test_without_a_budget_everything_is_trained() -> None:
    plan = plan_of(profile_of(), Budget())
    assert plan.transform(Windows) is None and plan.mask.all()
    assert plan.predicted_step_seconds == pytest.approx(plan.full_step_seconds)


@pytest.mark.parametrize("speedup", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("kind", ["conv", "chain"])
def test_the_widest_windows_that_fit(kind: str, speedup: float) -> None:
    profile = profile_of(kind)
    plan = plan_of(profile, Budget(speedup=speedup))
    assert plan.full_step_seconds == profile.full_step_seconds
    # Within the time, unless half of the channels are not.
    assert plan.feasible or windows_of(plan).rate == 1 / 2
    wider = plan_of(profile, Budget(), SliceOutPolicy(rate=windows_of(plan).rate + 1 / 16))
    assert wider.predicted_step_seconds > profile.full_step_seconds / speedup
    assert plan.mask.all() and plan.groups == profile.graph.groups


def test_a_layer_between_two_windows_costs_the_product_of_their_shares() -> None:
    profile = profile_of("chain")
    kept = {width: width.size // 2 for width in profile.graph.widths}
    narrow = narrow_profile(profile, kept)
    linears = [i for i, node in enumerate(profile.graph.nodes) if node.group is not None]
    ratio = narrow.node_update_seconds[linears] / profile.node_update_seconds[linears]
    # The head and the first layer lie beside one width, the others between two.
    np.testing.assert_allclose(ratio, [0.5, 0.25, 0.25, 0.5])
    shapes = {group.name: group.shapes for group in narrow.graph.groups}
    assert shapes == {
        "6": ((3, 6), (3,)), "4": ((6, 6), (6,)), "2": ((6, 6), (6,)), "0": ((6, 6), (6,))
    }  # fmt: skip
    assert narrow.full_step_seconds < profile.full_step_seconds


def test_memory_and_uplink_decide_as_well() -> None:
    profile = profile_of("chain")
    full = step_memory(profile, plan_of(profile, Budget()).modes).total
    plan = plan_of(profile, Budget(memory=0.7 * full))
    assert plan.predicted_step_bytes <= 0.7 * full and not plan.lean
    sent = float(profile.parameter_bytes.sum())
    lasting = plan_of(profile, Budget(uplink=0.5 * sent), SliceOutPolicy(every="fit"))
    assert windows_of(lasting).every == "fit"
    with pytest.raises(BudgetError, match="let windows last for a fit"):
        # The steps of a fit train everything between them.
        plan_of(profile, Budget(uplink=0.5 * sent))
    with pytest.raises(BudgetError, match="with the narrowest windows keeps"):
        plan_of(profile, Budget(memory=100.0))


def test_below_the_narrowest_windows_fewer_steps_are_taken() -> None:
    plan = plan_of(profile_of(), Budget(speedup=1000.0))
    assert not plan.feasible and 0 < plan.step_fraction < 1


def test_a_given_rate_holds() -> None:
    plan = plan_of(profile_of(), Budget(speedup=1.1), SliceOutPolicy(rate=0.25))
    assert windows_of(plan).rate == 0.25


def test_widths_of_what_is_not_trained_stay_whole() -> None:
    profile = profile_of("chain")
    above = replace(profile.graph, groups=profile.graph.groups[:2], nodes=tuple(
        replace(node, group=node.group if node.group is not None and node.group < 2 else None)
        for node in profile.graph.nodes
    ))  # fmt: skip
    part = replace(
        profile, graph=above, optimizer_seconds=profile.optimizer_seconds[:2],
        forward_seconds=profile.forward_seconds[:2],
    )  # fmt: skip
    plan = plan_of(part, Budget(speedup=2.0))
    assert [w.name for w in windows_of(plan).widths] == ["4"]


def test_models_without_inner_widths_are_refused() -> None:
    profile = flat_profile(Attention(), vectors()[0])
    with pytest.raises(PlanError, match="none was found in this model"):
        SliceOutPolicy().refuse_misfit(profile)
    SliceOutPolicy().refuse_misfit(flat_profile(Residual(), images()[0]))


def test_widths_that_the_model_cannot_run_on_are_left_out_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batches = Heads(heads=4), vectors(6)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.5), policy="slice_out",
        profile=flat_profile(model, batches[0]), options=TrainerOptions(timing=Timing(closed_loop=False)),
    )  # fmt: skip
    plan = trainer.fit(batches).plan
    assert [w.name for w in windows_of(plan).widths] == ["mlp.1"]
    assert trainer.state.memory.of("slice_out").facts == {"left_out": ["query"]}
    tried: list[str] = []

    def noted(model: nn.Module, widths: Sequence[Width], batch: Batch) -> tuple[Width, ...]:
        tried.extend(width.name for width in widths)
        return tuple(widths)

    monkeypatch.setattr("fl_elastic.methods.windows.proven_widths.proven_widths", noted)
    trainer.fit(batches)
    assert set(tried) == {"mlp.1"}


@pytest.mark.parametrize(
    "facts", [{"left_out": "mlp.1"}, {"left_out": [3, None]}, {}, {"left_out": ["query", "mlp.1"]}]
)
def test_a_memory_of_something_else_does_no_harm(facts: dict[str, Any]) -> None:
    model, batches = Heads(), vectors(6)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.5), policy="slice_out",
        profile=flat_profile(model, batches[0]), options=TrainerOptions(timing=Timing(closed_loop=False)),
    )  # fmt: skip
    trainer.state.fit_to(trainer.profile.group_names if trainer.profile else ())
    trainer.state.memory = PolicyMemory("slice_out", facts)
    plan = trainer.fit(batches).plan
    assert len(windows_of(plan).widths) == 2


@pytest.mark.parametrize("settings", [{"rate": 0}, {"every": "day"}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        SliceOutPolicy(**settings)
