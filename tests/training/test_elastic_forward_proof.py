"""Features are kept only where each example's are its own, whenever they are computed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from plain_loop import assert_weights
from small_models import Batch, images, loss_fn, sgd, trainer_of
from torch import Tensor, nn
from torch.nn import functional

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.training import FitReport, ForwardOptions, TrainerOptions


class Net(nn.Module):
    """Three convolutions; what happens behind the first is up to the kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4, track_running_stats=kind != "batch statistics")
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        if self.kind == "functional dropout":
            y = functional.dropout(y, 0.5, training=self.training)
        if self.kind == "own noise":
            y = y + 0.1 * torch.randn_like(y) if self.training else y
        if self.kind == "python's chance" and self.training:
            y = y * random.choice((1.0, 2.0))
        if self.kind == "centred on the batch":
            y = y - y.mean(0, keepdim=True)
        if self.kind == "decides on the batch":
            y = y * 2 if y.mean() > 1e6 else y
        y = torch.relu(self.second(y))
        if self.kind == "decides on features" and y.std() > 1e-3:
            y = 3 * y
        y = torch.relu(self.third(y)).mean((2, 3))
        out: Tensor = self.head(y)
        return out


def fitted(kind: str, **settings: Any) -> tuple[Any, nn.Module, list[Batch]]:
    torch.manual_seed(1)
    model, batches = Net(kind), images(3)
    forward = ForwardOptions(feature_bytes=1 << 22, precision="fp32", **settings)
    trainer = trainer_of(model, batches[0], ["head", "third"], forward=forward)
    return trainer.fit(batches, epochs=3).forward, model, batches


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("functional dropout", "random"),
        ("own noise", "random"),
        ("python's chance", "random"),
        ("batch statistics", "mixes the examples"),
        ("centred on the batch", "mixes the examples"),
        ("decides on the batch", "branches on"),
    ],
)
def test_what_is_no_constant_of_an_example_is_not_kept(kind: str, reason: str) -> None:
    report, _, _ = fitted(kind)
    assert report.found == 0 and report.feature_bytes == 0
    assert reason in report.refused


def test_what_is_constant_is_kept() -> None:
    report, _, _ = fitted("plain")
    assert report.found > 0 and report.refused == ""


@pytest.mark.parametrize("kind", ["plain", "decides on features", "decides on the batch"])
def test_training_on_features_is_training_as_ever(kind: str) -> None:
    _, model, batches = fitted(kind)
    torch.manual_seed(1)
    twin = Net(kind)
    trainer = trainer_of(twin, batches[0], ["head", "third"])
    trainer.fit(batches, epochs=3)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, twin.state_dict()[name], atol=1e-4), name


@pytest.mark.parametrize("before", [False, True])
def test_a_loss_that_uses_what_a_hook_keeps_gets_it_in_every_batch(before: bool) -> None:
    def trained(forward: ForwardOptions | None) -> tuple[FitReport, nn.Module]:
        torch.manual_seed(1)
        model, batches, kept = Net("plain"), images(3), []
        if before:
            model.second.register_forward_pre_hook(lambda _, given: kept.append(given[0].detach()))
        else:
            model.first.register_forward_hook(lambda _, given, out: kept.append(out.detach()))

        def distilled(out: Tensor, targets: Tensor) -> Tensor:
            return loss_fn(out, targets) + (out - kept.pop().mean((2, 3))[:, :3]).square().mean()

        trainer = ElasticTrainer(
            model,
            distilled,
            sgd,
            budget=Budget(),
            policy="head",
            options=TrainerOptions(forward=forward),
        )
        return trainer.fit(batches, epochs=3), model

    report, model = trained(ForwardOptions(feature_bytes=1 << 22, precision="fp32"))
    assert report.forward is not None and "hook on" in report.forward.refused
    assert_weights(model, trained(None)[1], rtol=0, atol=0)


class Threshold(nn.Module):
    """Weighs its last features by how large its first ones are, which lie below the cut and are lost there."""

    def __init__(self, by_python: bool) -> None:
        super().__init__()
        self.by_python, self.threshold = by_python, 0.0
        self.first, self.second, self.third = (
            nn.Conv2d(before, 4, 3, padding=1) for before in (3, 4, 4)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        if self.by_python:
            factor = torch.tensor(3.0 if y.mean() > self.threshold else 1.0)
        else:
            factor = torch.where(y.mean() > self.threshold, 3.0, 1.0)
        y = factor * torch.relu(self.third(torch.relu(self.second(y))))
        out: Tensor = self.head(y.mean((2, 3)))
        return out


@pytest.mark.parametrize("by_python", [True, False])
@pytest.mark.parametrize("feature_bytes", [0, 1 << 22])
def test_what_decides_by_values_below_the_cut_runs_whole(
    by_python: bool, feature_bytes: int
) -> None:
    batches = images(3)
    batches = [batches[0], *((5 * inputs, targets) for inputs, targets in batches[1:])]

    def trained(forward: ForwardOptions | None) -> tuple[FitReport, dict[str, Tensor]]:
        torch.manual_seed(1)
        model = Threshold(by_python)
        with torch.no_grad():
            model.threshold = 2 * float(torch.relu(model.first(batches[0][0])).mean())
        trainer = trainer_of(model, batches[0], ["head", "third"], forward=forward)
        return trainer.fit(batches, epochs=3), model.state_dict()

    report, mine = trained(ForwardOptions(feature_bytes=feature_bytes, precision="fp32"))
    assert report.forward is not None and report.forward.cut == ""
    said = "branches on values" if by_python else "gives other outputs"
    assert said in report.forward.refused
    _, plain = trained(None)
    for name, value in plain.items():
        assert torch.allclose(mine[name], value, atol=1e-6), name


class SkipsAtRandom(nn.Module):
    """Drops its second layer in every other step, as layer drop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() < 0.5:
                x = torch.relu(layer(x))
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("seed", range(6))
def test_layers_that_are_dropped_at_random_are_measured_and_trained(seed: int) -> None:
    from small_models import sgd, vectors

    from fl_elastic.budget import Budget
    from fl_elastic.training import ElasticTrainer, TrainerOptions

    random.seed(seed)
    model = SkipsAtRandom()
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.2),
        options=TrainerOptions(forward=ForwardOptions(feature_bytes=1 << 20)),
    )  # fmt: skip
    report = trainer.fit(vectors(12), epochs=2)
    assert report.steps > 0
    assert {g.name for g in report.plan.groups} == {"head", *(f"layers.{n}" for n in range(4))}
