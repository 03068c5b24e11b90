"""Fits in windows of channels: budget, statistics, updates and how they are merged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peak_bytes import peak_bytes
from small_models import (
    adam,
    chain,
    conv_net,
    flat_profile,
    images,
    loss_fn,
    sgd,
    vectors,
    weights_of,
)
from torch import nn
from trainer_settings import settings_of

from fl_elastic.aggregation import PartialMean
from fl_elastic.budget import Budget
from fl_elastic.errors import DivergedError, PlanError, TrainingError
from fl_elastic.methods.windows.policy import SliceOutPolicy
from fl_elastic.methods.windows.steps import retake_statistics
from fl_elastic.methods.windows.windows import Windows
from fl_elastic.planning import PlanRequest
from fl_elastic.profiling import profile_model
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.training import ElasticTrainer, apply_plan
from fl_elastic.training.measured import measure_plan
from fl_elastic.update import Manifest, decode, encode
from fl_elastic.update.checks import check_update


def trainer_of(
    model: nn.Module,
    batch: Any,
    policy: Any,
    budget: Budget | None = None,
    make: Any = sgd,
    **options: Any,
) -> ElasticTrainer:
    settings: dict[str, Any] = {"closed_loop": False} | options
    return ElasticTrainer(
        model, loss_fn, make, budget=budget or Budget(), policy=policy,
        profile=flat_profile(model, batch, make), **settings_of(**settings),
    )  # fmt: skip


def test_an_update_holds_the_windows_of_its_fit_alone() -> None:
    model, batches = chain(), vectors(4)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = trainer_of(model, batches[0], SliceOutPolicy(rate=0.5, every="fit"), make=adam)
    report = trainer.fit(batches, epochs=2)
    assert report.steps == 8 and report.based_on == "windows of channels"
    update, manifest = trainer.update(), Manifest.of(model)
    check_update(update, manifest)
    assert update.steps["2.weight"] == 8
    rows, columns = update.parts["2.weight"]
    assert rows.sum() == 6 and columns.sum() == 6
    assert (update.parts["2.bias"][0] == rows).all() and "6.bias" not in update.parts
    for name, old in before.items():
        np.testing.assert_allclose(
            old.numpy() + update.deltas[name], weights_of(model)[name].numpy(), atol=1e-6
        )
    whole = trainer_of(chain(), batches[0], "full")
    whole.fit(batches, epochs=2)
    sent = len(encode(update, manifest)), len(encode(whole.update(), manifest))
    assert sent[0] < 0.75 * sent[1]
    again = decode(encode(update, manifest), manifest)
    assert again.parts.keys() == update.parts.keys()
    assert all(np.array_equal(again.deltas[n], update.deltas[n]) for n in update.deltas)


def test_steps_in_other_windows_train_all_of_a_tensor_between_them() -> None:
    model, batches = chain(), vectors(8)
    trainer = trainer_of(model, batches[0], SliceOutPolicy(rate=0.5), seed=1)
    trainer.fit(batches, epochs=2)
    assert trainer.update().parts == {}


def test_parts_of_clients_are_merged_element_by_element() -> None:
    batches, base = vectors(2), chain()
    manifest, mean = Manifest.of(base), PartialMean(Manifest.of(base))
    total: dict[str, Any] = {n: np.zeros(p.shape) for n, p in base.named_parameters()}
    count = {n: np.zeros(p.shape) for n, p in base.named_parameters()}
    for seed in range(5):
        model = copy.deepcopy(base)
        trainer = trainer_of(model, batches[0], SliceOutPolicy(rate=0.5, every="fit"), seed=seed)
        trainer.fit(batches)
        update = trainer.update()
        mean.add(update)
        for name, delta in update.deltas.items():
            masks = update.parts.get(name, (None,) * delta.ndim)
            held = np.ones(delta.shape)
            for axis, mask in enumerate(masks):
                if mask is not None:
                    held = held * mask.reshape([-1 if a == axis else 1 for a in range(delta.ndim)])
            total[name] += delta
            count[name] += held
    old = {n: p.detach().numpy() for n, p in base.named_parameters()}
    merged = mean.finish({name: old[name] for name in manifest.names})
    for name, value in old.items():
        expected = value + total[name] / np.maximum(count[name], 1)
        np.testing.assert_allclose(merged[name], expected, rtol=1e-5, atol=1e-7)


def test_running_statistics_are_those_of_the_whole_model() -> None:
    model, batches = conv_net(), images(4)
    trainer = trainer_of(model, batches[0], SliceOutPolicy(rate=0.5))
    trainer.fit(batches)
    expected = copy.deepcopy(model)
    retake_statistics(expected, batches[-1:])
    for name, value in expected.named_buffers():
        if "tracked" not in name:
            torch.testing.assert_close(model.get_buffer(name), value)
    assert {n for n in trainer.update().deltas if "running" in n} == {
        n for n, _ in model.named_buffers() if "tracked" not in n
    }


def test_settled_statistics_are_means_over_the_batches() -> None:
    model, batches = nn.Sequential(nn.BatchNorm2d(3)), images(5)
    retake_statistics(model, batches)
    stacked = torch.stack([x.mean((0, 2, 3)) for x, _ in batches]).mean(0)
    torch.testing.assert_close(model[0].running_mean, stacked)
    spread = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x, _ in batches]).mean(0)
    torch.testing.assert_close(model[0].running_var, spread)
    assert model[0].momentum == 0.1


def test_a_budget_is_held_by_narrower_windows_and_predicted() -> None:
    model, batches = conv_net(), images(6)
    trainer = trainer_of(model, batches[0], "slice_out", Budget(speedup=2.0))
    report = trainer.fit(batches, epochs=2)
    assert report.plan.transform(Windows) is not None and report.plan.transform(Windows).rate < 1
    assert report.predicted_seconds <= 12 * report.full_step_seconds / 2 * (1 + 1e-6)
    assert 0 < report.steps <= 12


def test_outputs_that_are_not_finite_are_refused_before_a_window_is_chosen() -> None:
    model, batches = conv_net(), images(3)
    trainer = trainer_of(model, batches[0], SliceOutPolicy(rate=0.5))
    broken = [(inputs * torch.nan, targets) for inputs, targets in batches]
    with pytest.raises(DivergedError, match="outputs for a batch are not finite"):
        trainer.fit(broken)


def test_a_failing_fit_puts_model_and_momentum_back() -> None:
    model, batches = conv_net(), images(3)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    trainer = trainer_of(model, batches[0], SliceOutPolicy(rate=0.5), make=make)
    trainer.fit(batches)
    before = copy.deepcopy(model.state_dict())
    momentum = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    broken = [*batches[:2], (batches[2][0] * torch.nan, batches[2][1])]
    with pytest.raises(TrainingError, match="the loss is nan"):
        trainer.fit(broken)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    now = trainer.optimizer.state_dict()["state"]
    for number, state in momentum.items():
        assert torch.equal(now[number]["momentum_buffer"], state["momentum_buffer"])


def test_the_pull_of_fedprox_is_on_the_window() -> None:
    """One step from the anchor has no pull, the second one has that of the first's change."""

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    batches, start, changes = vectors(2), chain(), []
    for weight in (0.0, 0.5):
        found = []
        for steps in (1, 2):
            trainer = trainer_of(
                copy.deepcopy(start), batches[0], SliceOutPolicy(rate=0.5, every="fit"),
                proximal=weight, seed=2, make=plain,
            )  # fmt: skip
            trainer.fit(batches[:steps])
            found.append(trainer.update().deltas)
        changes.append(found)
    for name in changes[0][0]:
        (one, free), (_, pulled) = [(one[name], two[name]) for one, two in changes]
        np.testing.assert_allclose(pulled, free - 0.1 * 0.5 * one, rtol=1e-4, atol=1e-7)


def test_loops_of_ones_own_are_refused_with_a_reason() -> None:
    model, batch = chain(), vectors()[0]
    profile = flat_profile(model, batch)
    plan = SliceOutPolicy(rate=0.5).plan(PlanRequest(profile, Budget(), np.zeros(len(profile))))
    with (
        pytest.raises(PlanError, match="only ElasticTrainer can set it for each step"),
        apply_plan(model, plan),
    ):
        pass


def test_a_measured_plan_is_taken_in_windows_and_leaves_no_trace() -> None:
    model, batch = conv_net(), images()[0]
    profile = flat_profile(model, batch)
    plan = SliceOutPolicy(rate=0.25).plan(PlanRequest(profile, Budget(), np.zeros(len(profile))))
    shapes: list[tuple[int, ...]] = []
    model[0].register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
    before = copy.deepcopy(model.state_dict())
    found = measure_plan(model, loss_fn, batch, sgd, plan, repeats=2)
    assert {shape[1] for shape in shapes} >= {1, 4} and found.step_seconds > 0
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_copies_of_the_whole_weights_are_part_of_a_memory_budget(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 512, 3, padding=1), nn.ReLU(),
        nn.Conv2d(512, 16, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    batch = torch.randn(4, 3, 6, 6), torch.arange(4) % 3
    profile = profile_model(model, loss_fn, batch, optimizer_fn=sgd)
    memory = 0.8 * mask_bytes(profile, np.ones(len(profile), dtype=bool))
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(memory=memory), policy="slice_out_fit", profile=profile
    )
    with torch.no_grad():
        inference = peak_bytes(lambda: model(batch[0]), tmp_path)
    taken = peak_bytes(lambda: trainer.fit([batch] * 2), tmp_path)
    assert taken <= inference + 1.05 * memory
