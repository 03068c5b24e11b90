"""The code that a process loads to train counts in its first fit, and in no later one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import loss_fn, sgd
from torch import nn

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.profiling import memory
from fl_elastic.profiling.estimate import estimate_profile
from fl_elastic.profiling.memory import CODE_BYTES, KERNEL_BYTES, mask_bytes
from fl_elastic.training import Timing, TrainerOptions


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "_has_trained", False)
    yield


def wide() -> nn.Module:
    """Weights of 14 MB in four layers."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(1024, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 1024), torch.arange(4) % 3


def predicted(trainer: ElasticTrainer) -> float:
    return trainer.fit([batch()]).plan.predicted_step_bytes


def test_code_is_charged_in_the_first_fit_of_a_process_alone() -> None:
    first, second = (
        predicted(ElasticTrainer(wide(), loss_fn, sgd, budget=Budget(memory=1e9))) for _ in range(2)
    )
    assert first == pytest.approx(second + CODE_BYTES - KERNEL_BYTES)


def test_a_second_fit_uses_what_code_took_before() -> None:
    profile = estimate_profile(wide(), loss_fn, batch(), optimizer_fn=sgd)
    everything = mask_bytes(profile, np.ones(len(profile), dtype=bool), lean=True)
    model, budget = wide(), Budget(memory=1.1 * everything)
    groups = []
    for _ in range(2):
        trainer = ElasticTrainer(model, loss_fn, sgd, budget=budget)
        groups.append(int(trainer.fit([batch()]).plan.mask.sum()))
    assert groups[0] < groups[1] == len(profile)


def test_a_simulated_device_loads_code_in_each_of_its_processes() -> None:
    options = TrainerOptions(timing=Timing(closed_loop=False))
    one, other = (
        predicted(ElasticTrainer(wide(), loss_fn, sgd, budget=Budget(memory=1e9), options=options))
        for _ in range(2)
    )
    assert one == other


def test_small_steps_are_not_outweighed_by_code() -> None:
    profile = estimate_profile(
        nn.Linear(8, 3), loss_fn, (torch.randn(4, 8), torch.arange(4) % 3), optimizer_fn=sgd
    )
    mask = np.ones(len(profile), dtype=bool)
    assert mask_bytes(replace(profile, code_bytes=CODE_BYTES), mask) == mask_bytes(profile, mask)


def test_a_budget_below_code_is_said_not_to_hold_in_the_first_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = []
    for limit in (1e6, 1e6, 1e9):
        model = nn.Linear(8, 3)
        trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(memory=limit))
        caplog.clear()
        trainer.fit([(torch.randn(4, 8), torch.arange(4) % 3)])
        said.append("a memory budget of 1 MB is less than the 24 MB of code" in caplog.text)
    assert said == [True, False, False]
