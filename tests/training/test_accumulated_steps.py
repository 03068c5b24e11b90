"""A step of several batches trains as a plain loop does that adds their gradients up."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import assert_weights
from small_models import Batch, chain, flat_profile, loss_fn, trainer_of, vectors
from torch import nn
from trainer_settings import free_probes

from fl_elastic.budget import Budget
from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.methods.windows.policy import SliceOutPolicy
from fl_elastic.profiling.memory import step_memory
from fl_elastic.training import ElasticTrainer, TrainerOptions

GROUPS = ("6", "4", "2", "0")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def plain_loop(
    model: nn.Module, batches: list[Batch], trained: set[str], accumulate: int
) -> dict[str, torch.Tensor]:
    """Train the named groups, a step of the optimiser after every so many batches and after the last."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in trained)
    optimizer = adam([each for each in model.parameters() if each.requires_grad])
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(batches, start=1):
        (loss_fn(model(inputs), targets) / accumulate).backward()
        if number % accumulate == 0 or number == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("accumulate", [1, 2, 3, 10])
@pytest.mark.parametrize("trained", [GROUPS, ("6", "4"), ("6", "0")])
def test_a_fit_equals_a_plain_loop(accumulate: int, trained: tuple[str, ...]) -> None:
    model, batches = chain(), vectors(7)
    expected = plain_loop(copy.deepcopy(model), batches, set(trained), accumulate)
    trainer = trainer_of(model, batches[0], trained, optimizer_fn=adam, accumulate=accumulate)
    report = trainer.fit(batches)
    assert_weights(model, expected, rtol=1e-5, atol=1e-6)
    assert report.steps == 7
    steps = trainer.update().steps
    assert set(steps.values()) == {-(-7 // accumulate)}
    assert {name.split(".")[0] for name in steps} == set(trained)


def test_a_choice_waits_for_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    free_probes(monkeypatch)
    model, batches = chain(), vectors(9)
    trainer = trainer_of(
        model, batches[0], ["6"], ["6", "4"], optimizer_fn=adam, budget=Budget(speedup=1.2),
        accumulate=3, probe_every=2, below_cosine=2.0,
    )  # fmt: skip
    report = trainer.fit(batches)
    assert all(start % 3 == 0 for start, _ in report.plans) and len(report.plans) > 1


def test_a_fit_that_ends_for_want_of_time_takes_the_step_that_is_owed() -> None:
    model, batches = chain(), vectors(20)
    full = flat_profile(model, batches[0]).full_step_seconds
    trainer = trainer_of(
        model, batches[0], GROUPS, optimizer_fn=adam, budget=Budget(deadline=4 * full), accumulate=3
    )
    assert trainer.fit(batches).steps == 4
    assert set(trainer.update().steps.values()) == {2}


def test_a_failure_between_two_batches_leaves_no_trace() -> None:
    model, batches = chain(), vectors(4)
    batches[1] = (torch.full_like(batches[1][0], torch.nan), batches[1][1])
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_of(model, batches[0], GROUPS, optimizer_fn=adam, accumulate=4)
    with pytest.raises(TrainingError, match="the loss is nan"):
        trainer.fit(batches)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_wait_count_against_the_memory() -> None:
    model, batches = chain(), vectors(4)

    def bytes_of(accumulate: int) -> float:
        trainer = trainer_of(copy.deepcopy(model), batches[0], GROUPS, accumulate=accumulate)
        return trainer.fit(batches).plan.predicted_step_bytes

    trained = sum(each.numel() for each in model.parameters())
    assert bytes_of(2) - bytes_of(1) == pytest.approx(4.0 * trained)
    assert bytes_of(1) == step_memory(
        flat_profile(model, batches[0]), trainer_of(model, batches[0], GROUPS).fit(batches).plan.modes
    ).total  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_the_optimisers_time_is_spread_over_the_batches_of_a_step(accumulate: int) -> None:
    model, batches = chain(), vectors(20)
    trainer = trainer_of(model, batches[0], GROUPS, optimizer_fn=adam, accumulate=accumulate)
    profile = trainer.profile
    assert profile is not None
    trainer.profile = replace(profile, optimizer_seconds=np.full(len(profile), 2.0))
    full = profile.full_step_seconds + 2.0 * len(profile) / accumulate
    report = trainer.fit(batches)
    assert report.full_step_seconds == pytest.approx(full)
    assert report.plan.full_step_seconds == pytest.approx(full)
    # The costs of a step by itself stay what they are.
    assert trainer.profile.optimizer_seconds.tolist() == [2.0] * len(profile)


def test_costs_that_are_measured_while_training_are_those_of_a_step_by_itself() -> None:
    model, batches = chain(), vectors(40)
    profile = replace(
        flat_profile(model, batches[0], adam),
        estimated=True, optimizer_seconds=np.full(4, 2.0), optimizer_bytes_per_weight=8.0,
    )  # fmt: skip
    trainer = ElasticTrainer(
        model, loss_fn, adam, budget=Budget(speedup=1.0), policy="full", profile=profile,
        options=TrainerOptions(accumulate=4),
    )  # fmt: skip
    trainer.fit(batches)
    found = trainer.profile
    assert found is not None and found.optimizer_bytes_per_weight == 8.0
    # Every part of the estimate was scaled by what steps took, and by the same.
    scales = found.optimizer_seconds / profile.optimizer_seconds
    backward = found.node_path_seconds.sum() / profile.node_path_seconds.sum()
    assert scales.tolist() == pytest.approx([backward] * 4)


def test_windows_of_channels_are_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    batches = [(torch.randn(4, 3, 8, 8), torch.arange(4) % 4) for _ in range(6)]
    trainer = ElasticTrainer(
        model, nn.functional.cross_entropy, adam, budget=Budget(), policy=SliceOutPolicy(0.5),
        options=TrainerOptions(accumulate=2, full_update_every=0),
    )  # fmt: skip
    with pytest.raises(PlanError, match="accumulate 2"):
        trainer.fit(batches)
