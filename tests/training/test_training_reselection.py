"""Selecting again while training: when, by what, and without a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import (
    AsTold,
    adam,
    chain,
    conv_net,
    elastic_trainer,
    flat_profile,
    images,
    loss_fn,
    sgd,
    trainer_of,
    vectors,
    weights_of,
)
from trainer_settings import free_probes

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.testing.probes import Snapshot
from fl_elastic.training import ElasticTrainer, TrainerOptions
from fl_elastic.training import trainer as trainer_module
from fl_elastic.training.step import TrainingStep


def test_a_device_slower_than_its_profile_selects_by_importance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = vectors(60)
    model = chain()
    profile = flat_profile(model, batches[0])
    scale = 0.5 / profile.full_step_seconds
    profile = replace(
        profile,
        node_update_seconds=profile.node_update_seconds * scale,
        node_path_seconds=profile.node_path_seconds * scale,
        forward_seconds=profile.forward_seconds * scale,
    )
    now, take = [0.0], TrainingStep.take

    def slow(self: TrainingStep, batch: Batch) -> float:
        """Each step takes one second, whatever it trains."""
        now[0] += 1.0
        return take(self, batch)

    monkeypatch.setattr(TrainingStep, "take", slow)
    monkeypatch.setattr(trainer_module, "clock_for", lambda *_: lambda: now[0])
    trainer = ElasticTrainer(
        model,
        loss_fn,
        sgd,
        budget=Budget(deadline=48.0),
        profile=profile,
        options=TrainerOptions(full_update_every=0),
    )
    report = trainer.fit(batches)
    # By the profile everything fits; twenty measured steps show that it does not.
    assert report.plans[0][1].mask.all() and report.plans[1][0] == 20
    assert report.importance != {}
    assert report.plan.mask.sum() > 1
    assert report.steps < 60


@pytest.mark.parametrize("optimizer_fn", [sgd, adam], ids=["sgd", "adam"])
def test_probing_in_the_midst_of_training_leaves_no_trace(optimizer_fn: OptimizerFn) -> None:
    batches = images(4)
    model = conv_net()
    trainer = ElasticTrainer(model, loss_fn, optimizer_fn, budget=Budget(speedup=1.2))
    trainer.fit(batches)
    assert trainer.optimizer is not None and trainer.optimizer.state
    before = Snapshot(model, trainer.optimizer)
    scores = trainer.planner.importance.score(trainer.planner.probe(batches[:2]))
    assert before.differences() == []
    assert (scores != 0).all()


def test_the_same_seed_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    free_probes(monkeypatch)
    batches = vectors(8)
    start = chain().state_dict()
    results = []
    for _ in range(2):
        model = chain()
        model.load_state_dict(start)
        torch.manual_seed(3)
        trainer = elastic_trainer(
            model, batches[0], Budget(speedup=1.4), probe_every=2, below_cosine=2.0
        )
        report = trainer.fit(batches, epochs=2)
        results.append((weights_of(model), [(at, plan.modes) for at, plan in report.plans]))
    assert results[0][1] == results[1][1] and len(results[0][1]) > 2
    assert all(torch.equal(results[0][0][n], results[1][0][n]) for n in results[0][0])


def test_importance_is_probed_again_after_the_gap_and_kept_while_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_probes(monkeypatch)
    batches = vectors(2) * 10
    model = chain()
    settings = {"budget": Budget(speedup=1.01), "probe_every": 4}
    trainer = trainer_of(model, batches[0], ["6"], ["4"], below_cosine=-2.0, **settings)
    trainer.planner.policy = AsTold(["6"], ["4"])
    report = trainer.fit(batches)
    # Probes after 4 and 4 + 8 steps: the cosine is never below -2, so the plan stays and the gap grows.
    assert [at for at, _ in report.plans] == [0, 4, 12]
    assert all(plan is report.plan for _, plan in report.plans)
    trainer = trainer_of(model, batches[0], ["6"], ["4"], below_cosine=2.0, **settings)
    report = trainer.fit(batches)
    assert [at for at, _ in report.plans] == [0, 4, 8, 12, 16]
    assert report.plans[0][1].mask.tolist() == [True, False, False, False]
    assert report.plans[1][1].mask.tolist() == [False, True, False, False]


def test_a_group_left_out_is_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free_probes(monkeypatch)
    batches = vectors(2)
    model = chain()
    trainer = elastic_trainer(model, batches[0], Budget(speedup=1.12), exploration=0.3)
    seen = torch.zeros(4, dtype=torch.bool)
    for _ in range(25):
        seen |= torch.tensor(trainer.fit(batches).plan.mask)
    assert any(trainer.state.left_out) and seen.all()
    trainer = elastic_trainer(chain(), batches[0], Budget(speedup=1.12), exploration=0.0)
    assert not any(trainer.fit(batches).plan.mask[3] for _ in range(25))


@pytest.mark.parametrize("reselect_every", [3, 100])
def test_deep_fits_train_everything_in_fewer_steps(reselect_every: int) -> None:
    batches = vectors(12)
    model = chain()
    trainer = elastic_trainer(
        model,
        batches[0],
        Budget(speedup=1.5),
        full_update_every=2,
        exploration=0.0,
        probe_every=reselect_every,
    )
    reports = [trainer.fit(batches) for _ in range(20)]
    deep = [report for report in reports if report.plan.mask.all()]
    assert 3 <= len(deep) <= 17
    assert not any(report.plans[0][1].mask.all() for report in reports if report not in deep)
    for report in deep:
        assert report.plans == ((0, report.plan),)
        assert report.steps == 8
