"""Methods at one budget: each trains what it says, and known costs are not estimated again."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.losses import classification_loss
from fl_elastic.planning import PlanRequest
from fl_elastic.profiling import load_profile
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions
from fl_elastic_simulations.benchmarks.one_budget import (
    FEWER,
    METHODS,
    RandomBlocksPolicy,
    Trained,
    keep_costs,
    train,
)
from fl_elastic_simulations.data.datasets import load_dataset

PASSES = 2
COSTS = Path(__file__).parents[2] / "results" / "side_by_side" / "birds-costs.state"


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = load_dataset("digits")
    x, y = torch.from_numpy(data.train_x[:96]), torch.from_numpy(data.train_y[:96])
    return list(zip(torch.split(x, 16), torch.split(y, 16), strict=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 10)).train()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def trained(name: str, model: nn.Module, **more: Any) -> Trained:
    method = METHODS[name]
    return train(
        method, model, classification_loss, sgd, images(),
        passes=method.passes(PASSES),
        options=TrainerOptions(full_update_every=0, timing=Timing(clock="cpu")), **more,
    )  # fmt: skip


def changed(before: nn.Module, after: nn.Module) -> set[str]:
    old = before.state_dict()
    return {name for name, each in after.state_dict().items() if not torch.equal(each, old[name])}


HEAD = {"6.weight", "6.bias"}


@pytest.mark.parametrize(
    ("name", "steps", "moved"),
    [
        (FEWER, 6, {"0.weight", "0.bias", "2.weight", "2.bias"} | HEAD),
        ("head, kept features", 24, HEAD),
        ("solved head", 0, HEAD),
        ("fine_tune", 6, None),
    ],
)
def test_a_rival_trains_what_it_says(name: str, steps: int, moved: set[str] | None) -> None:
    model = network()
    before = deepcopy(model)
    done = trained(name, model)
    assert done.steps == steps and done.seconds > 0
    assert moved is None or changed(before, model) == moved
    row = done.row()
    assert (row["uplink_bytes"] is None) == (steps == 0)
    if moved == HEAD and steps:
        assert row["uplink_bytes"] == 4 * (32 * 10 + 10)


@pytest.mark.parametrize(
    ("name", "fits"), [("random blocks", PASSES), ("neq", PASSES), ("full", 1)]
)
def test_each_pass_is_a_fit_where_that_is_said(
    name: str, fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    fit = ElasticTrainer.fit

    def counted(self: ElasticTrainer, loader: Any, epochs: int = 1) -> Any:
        calls.append(epochs)
        return fit(self, loader, epochs)

    monkeypatch.setattr(ElasticTrainer, "fit", counted)
    trained(name, network())
    assert len(calls) == fits and sum(calls) == PASSES


def test_costs_are_measured_once_and_then_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "some" / "costs.json", network()
    methods = [METHODS["joint"], METHODS["random blocks"], METHODS["solved head"]]
    for _ in range(2):
        keep_costs(path, model, classification_loss, sgd, images()[0], methods)
        written = path.stat().st_mtime_ns
        monkeypatch.setattr(
            "fl_elastic_simulations.benchmarks.one_budget.profile_model", unexpected
        )
    assert path.stat().st_mtime_ns == written
    monkeypatch.setattr("fl_elastic.profiling.estimate.estimate_profile", unexpected)
    assert trained("joint", network(), profile=load_profile(path)).steps > 0


def unexpected(*_: Any, **__: Any) -> Any:
    raise AssertionError("costs are known")


def test_random_blocks_hold_the_head_and_the_budget() -> None:
    # Costs of MobileNetV2, as they were measured once.
    profile, masks = load_profile(COSTS), set()
    for seed in range(20):
        request = PlanRequest(
            profile,
            Budget(speedup=1.3),
            np.zeros(len(profile)),
            generator=np.random.default_rng(seed),
        )
        plan = RandomBlocksPolicy().plan(request)
        assert plan.mask[profile.graph.head]
        assert profile.step_seconds(plan.mask) <= request.allowed_step_seconds * (1 + 1e-6)
        masks.add(tuple(plan.mask.tolist()))
    assert len(masks) > 3
