"""The TinyTrain-style policies against the greedy selection written out, and their limits."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peak_bytes import peak_bytes
from published_nets import chain_of, made_up_costs
from small_models import conv_net, images, loss_fn, sgd
from torch import nn
from torch.nn.functional import cross_entropy

from fl_elastic.budget import Budget
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph, GroupKind
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.methods.sparse_update.published_schemes import PUBLISHED_MODELS
from fl_elastic.methods.tinytrain.policy import TinyTrainPolicy, layer_worth
from fl_elastic.planning import POLICIES, Plan, PlanRequest
from fl_elastic.planning.channel_modes import channel_modes
from fl_elastic.planning.importance.channel_scores import FisherChannels
from fl_elastic.planning.importance.channels import choose_channels
from fl_elastic.planning.importance.fidelity import Fidelity
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.macs import backward_macs, group_macs
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.profiling.profile import ModeCosts
from fl_elastic.testing import made_up_profile
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions

LAYERS = PUBLISHED_MODELS[1].layers
SHAPE = (2, 3, 64, 64)


def traced(model: nn.Module, shape: tuple[int, ...] = SHAPE) -> BackwardGraph:
    batch = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)
    with untouched(model):
        return trace_step(model, cross_entropy, batch).graph


def profile_of(graph: BackwardGraph, shape: tuple[int, ...] = SHAPE) -> CostProfile:
    """Seconds are random."""
    generator = np.random.default_rng(0)
    return made_up_costs(graph, shape, lambda nodes: generator.uniform(0.5, 2, nodes), 4.0)


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    graph = traced(chain_of(LAYERS[:14], norms=True))
    base = profile_of(graph)
    modes = tuple(Mode.channels(r, axis) for axis in ("in", "out") for r in (1 / 2, 1 / 4, 1 / 8))
    ratios = np.tile([mode.fraction for mode in modes], (len(base), 1))
    return replace(base, modes=ModeCosts(modes, ratios, np.ones_like(ratios)))


def request_of(profile: CostProfile, budget: Budget, seed: int = 0) -> PlanRequest:
    generator = np.random.default_rng(seed)
    importance = generator.lognormal(0, 2, len(profile))
    modes = () if profile.modes is None else profile.modes.modes
    cosines = np.tile([mode.fraction**0.3 for mode in modes], (len(profile), 1))
    fidelity = Fidelity(modes, cosines)
    return PlanRequest(profile, budget, importance, fidelity=fidelity, generator=generator)


def literal_greedy(request: PlanRequest, axis: Any) -> list[Mode]:
    """The reference: by descending score, the first ratio with which all still fits."""
    graph = request.profile.graph
    macs, groups = group_macs(graph), graph.groups
    most_weights, most_macs = max(g.numel for g in groups), macs.max()
    scores = {}
    for i, group in enumerate(groups):
        if group.kind is GroupKind.CONV:
            effort = (group.numel / most_weights) * (macs[i] / most_macs)
            scores[i] = request.importance[i] / effort
    modes = [Mode.FROZEN] * len(groups)
    modes[0] = Mode.FULL
    for i in sorted(scores, key=lambda i: scores[i], reverse=True):
        for ratio in (1, 1 / 2, 1 / 4, 1 / 8):
            mode = Mode.FULL if ratio == 1 else Mode.channels(ratio, axis)
            trial = [*modes[:i], mode, *modes[i + 1 :]]
            if request.fits_modes(trial):
                modes = trial
                break
    return modes


def names_of(plan: Plan, kind: str) -> set[str]:
    return {g.name for g, mode in zip(plan.groups, plan.modes, strict=True) if mode.kind == kind}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("axis", ["in", "out"])
def test_the_policy_is_the_greedy_with_the_test_inside_the_loop(
    profile: CostProfile, axis: str, seed: int
) -> None:
    full = profile.plan_seconds([Mode.FULL] * len(profile))
    policy = POLICIES.make("tinytrain_in" if axis == "in" else "tinytrain")
    shares = []
    for speedup in (1.3, 1.7, 2.5, 4.0):
        request = request_of(profile, Budget(speedup=speedup), seed)
        plan = policy.plan(request)
        assert list(plan.modes) == literal_greedy(request, axis)
        assert plan.predicted_step_seconds <= full / speedup * (1 + 1e-9)
        shares.append(sum(mode.kind == "channels" for mode in plan.modes))
    assert sum(shares) > 0


def test_the_score_favours_depthwise_layers_of_mcunet_by_far() -> None:
    shape = (1, 3, 128, 128)
    made = profile_of(traced(chain_of(LAYERS, norms=True).eval(), shape), shape)
    worth = layer_worth(made, np.ones(len(made)))
    layers = [worth[i] for i, g in enumerate(made.graph.groups) if g.kind is GroupKind.CONV][::-1]
    assert layers[25] == pytest.approx(1500, rel=0.02)
    assert layers[39] == pytest.approx(3.3, rel=0.02)


@pytest.mark.parametrize("name", ["tinytrain", "tinytrain_in"])
def test_no_budget_means_the_published_share_of_multiply_adds(
    profile: CostProfile, name: str
) -> None:
    graph = profile.graph
    full = backward_macs(graph, [Mode.FULL] * len(profile))
    plan = POLICIES.make(name).plan(request_of(profile, Budget(), 3))
    assert backward_macs(graph, plan.modes) <= 0.15 * full
    assert plan.mask.sum() > 1 and plan.step_fraction == 1
    wide = POLICIES.make(name).plan(request_of(profile, Budget(speedup=1.0), 3))
    assert backward_macs(graph, wide.modes) > 0.5 * full


def test_norms_stay_frozen_and_the_head_trains(profile: CostProfile) -> None:
    for name in ("tinytrain", "tinytrain_in"):
        plan = POLICIES.make(name).plan(request_of(profile, Budget(speedup=1.0)))
        assert plan.policy == name and plan.modes[profile.graph.head] == Mode.FULL
        for group, mode in zip(plan.groups, plan.modes, strict=True):
            assert group.kind is not GroupKind.NORM or mode.is_frozen
        # Everything fits, so every layer trains whole.
        assert names_of(plan, "full") == {
            g.name for g in plan.groups if g.kind is not GroupKind.NORM
        }


def test_memory_is_kept_and_input_channels_make_more_of_it(profile: CostProfile) -> None:
    # Of a batch so large that activations count for more than weights.
    nodes = tuple(
        replace(n, shape=(32, *n.shape[1:])) if n.shape else n for n in profile.graph.nodes
    )
    profile = replace(
        profile,
        graph=replace(profile.graph, nodes=nodes),
        node_saved_bytes=16 * profile.node_saved_bytes,
    )
    free = POLICIES.make("tinytrain_in").plan(request_of(profile, Budget(memory=1e12)))
    trained: dict[str, float] = {"tinytrain": 0.0, "tinytrain_in": 0.0}
    for share in (0.5, 0.35, 0.25):
        budget = Budget(memory=free.predicted_step_bytes * share)
        for name in trained:
            plan = POLICIES.make(name).plan(request_of(profile, budget))
            assert budget.memory is not None and plan.predicted_step_bytes <= budget.memory
            shares = np.array([0.0 if m.is_frozen else m.fraction for m in plan.modes])
            trained[name] += float(shares @ request_of(profile, budget).importance)
    assert trained["tinytrain_in"] > trained["tinytrain"]


def test_worthless_layers_are_left_out_and_nothing_measured_means_the_last_ones(
    profile: CostProfile,
) -> None:
    request = request_of(profile, Budget(speedup=1.0))
    convolutions = [i for i, g in enumerate(profile.graph.groups) if g.kind is GroupKind.CONV]
    worth = np.zeros(len(profile))
    worth[convolutions[4]] = 1.0
    plan = POLICIES.make("tinytrain").plan(replace(request, importance=worth))
    assert np.flatnonzero(plan.mask).tolist() == [0, convolutions[4]]
    unmeasured = replace(
        request_of(profile, Budget(speedup=3.0)), importance=np.zeros(len(profile))
    )
    plan = POLICIES.make("tinytrain").plan(unmeasured)
    assert np.flatnonzero(plan.mask)[:3].tolist() == [0, *convolutions[:2]]


def test_without_shapes_layers_train_whole_or_not_at_all() -> None:
    made = made_up_profile(groups=10)
    request = PlanRequest(made, Budget(speedup=1.5), np.ones(10))
    plan = POLICIES.make("tinytrain").plan(request)
    assert {mode.kind for mode in plan.modes} == {"full", "frozen"}
    assert request.fits(plan.mask) and plan.mask.sum() > 1


def test_channels_are_offered_only_where_they_leave_one_out() -> None:
    shared = nn.Conv2d(8, 8, 1)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 8, 3, groups=2), shared, nn.ReLU(),
        shared, nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4), nn.Flatten(), nn.Linear(192, 20), nn.Linear(20, 3),
    )  # fmt: skip
    shape = (2, 1, 12, 12)
    made = profile_of(traced(model, shape), shape)
    offered = {
        axis: {made.group_names[g]: [str(m) for m in modes] for g, modes in channel_modes(made, axis).items()}
        for axis in ("in", "out")
    }  # fmt: skip
    assert offered["in"] == {
        "9": ["full", "in/2", "in/4", "in/8"],
        "7": ["full"],
        "3": ["full"],
        "2": ["full"],
        "1": ["full", "in/2", "in/4", "in/8"],
        "0": ["full"],
    }
    assert offered["out"]["0"] == offered["out"]["2"] == ["full", "out/2", "out/4", "out/8"]
    assert offered["out"]["3"] == ["full"]


def test_one_pass_tells_layers_and_their_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    kind = FisherChannels
    scored = kind.score

    def score(self: Any, *given: Any) -> Any:
        passes.append(given)
        return scored(self, *given)

    torch.manual_seed(0)
    model, batches = conv_net(), images(3)
    before = copy.deepcopy(model)
    monkeypatch.setattr(kind, "score", score)
    policy = TinyTrainPolicy(macs_share=0.5)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy=policy)
    plan = trainer.fit(batches).plan
    assert plan.channels and len(passes) == 1
    probe, graph = passes[0]
    slow = scored(kind(), replace(probe, model=before, found={}), traced(before, (6, 3, 8, 8)))
    assert plan.channels == choose_channels(plan.modes, graph, slow)
    # Weights have changed since: what was found does not count any more.
    trainer.planner.plan(1.0)
    assert len(passes) == 2


@pytest.mark.parametrize("policy", ["tinytrain", "tinytrain_in"])
def test_a_probe_takes_no_more_than_the_memory_budget(policy: str, tmp_path: Path) -> None:
    """It passes examples through one at a time, and keeps no layer's input of the whole batch."""
    torch.manual_seed(0)
    convolutions = [
        layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    ]
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    batch = torch.randn(64, 16, 16, 16), torch.arange(64) % 3
    with torch.no_grad():
        inference = peak_bytes(lambda: model(batch[0]), tmp_path)
    profile = profile_model(model, cross_entropy, batch, optimizer_fn=sgd)
    memory = 0.5 * mask_bytes(profile, np.ones(len(profile), dtype=bool))
    trainer = ElasticTrainer(
        model, cross_entropy, sgd, budget=Budget(memory=memory), policy=policy,
        profile=profile, options=TrainerOptions(timing=Timing(closed_loop=False)),
    )  # fmt: skip
    taken = peak_bytes(lambda: trainer.fit([batch] * 2), tmp_path)
    assert taken <= inference + memory
