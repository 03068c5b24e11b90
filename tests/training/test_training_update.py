"""What a fit hands over: deltas of what was trained, with the steps of each tensor."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from small_models import (
    AsTold,
    TiedLinears,
    chain,
    conv_net,
    images,
    loss_fn,
    sgd,
    trainer_of,
    used_twice,
    vectors,
    weights_of,
)
from torch import Tensor, nn
from trainer_settings import free_probes

from fl_elastic.aggregation import PartialMean
from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.training import ElasticTrainer
from fl_elastic.update import Manifest, decode, encode, load_weights
from fl_elastic.update import weights_of as arrays_of


def test_only_what_moved_is_in_the_update() -> None:
    batches = images(3)
    model = conv_net()
    before = weights_of(model)
    trainer = trainer_of(model, batches[0], ["11", "4", "0"])
    trainer.fit(batches)
    update = trainer.update()
    now = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], now[name])}
    counters = {name for name in moved if name.endswith("num_batches_tracked")}
    assert moved - counters == set(update.deltas)


def test_statistics_travel_only_where_they_were_updated() -> None:
    batches = images(4)
    trainer = trainer_of(conv_net(), batches[0], ["11", "7"])
    trainer.fit(batches)
    update = trainer.update()
    statistics = {name for name in update.deltas if "running" in name}
    assert statistics == {"7.running_mean", "7.running_var"}
    assert set(update.steps.values()) == {4}


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6)])
def test_statistics_of_a_norm_in_eval_do_not_travel(norm: nn.BatchNorm1d) -> None:
    batches = vectors(3)
    model = nn.Sequential(nn.Linear(6, 6), norm.eval(), nn.Linear(6, 3))
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    assert not any("running" in name for name in trainer.update().deltas)


def test_a_norm_without_weights_in_training_mode_sends_its_statistics() -> None:
    batches = vectors(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3))
    before = weights_of(model)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    delta = trainer.update().deltas["1.running_mean"]
    assert np.array_equal(delta, (model.state_dict()["1.running_mean"] - before["1.running_mean"]))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_of_every_kind_of_norm_travel(norm: type[nn.Module]) -> None:
    batches = images(3)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        norm(4, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    assert trainer.update().steps["1.running_mean"] == 3


def test_steps_are_counted_per_tensor_when_the_plan_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_probes(monkeypatch)
    batches = vectors(10)
    trainer = trainer_of(
        chain(),
        batches[0],
        ["6", "4"],
        ["6", "2"],
        ["0"],
        budget=Budget(speedup=1.01),
        probe_every=4,
        below_cosine=2.0,
    )
    trainer.planner.policy = AsTold(["6", "4"], ["6", "2"], ["0"])
    report = trainer.fit(batches)
    assert [at for at, _ in report.plans] == [0, 4, 8]
    update = trainer.update()
    steps = {
        name.removesuffix(".weight"): n for name, n in update.steps.items() if "weight" in name
    }
    assert steps == {"6": 8, "4": 4, "2": 4, "0": 2}
    assert all(update.steps[f"{name}.bias"] == count for name, count in steps.items())
    assert all(delta.any() for delta in update.deltas.values())


def test_statistics_are_counted_per_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    free_probes(monkeypatch)
    batches = images(9)
    trainer = trainer_of(
        conv_net(), batches[0], ["11", "7"], ["11", "4"],
        budget=Budget(speedup=1.01), probe_every=6, below_cosine=2.0,
    )  # fmt: skip
    trainer.planner.policy = AsTold(["11", "7"], ["11", "4"])
    trainer.fit(batches)
    steps = trainer.update().steps
    assert steps["7.running_var"] == steps["7.weight"] == 6
    assert steps["4.running_var"] == steps["4.weight"] == 3
    assert "1.running_var" not in steps


def test_each_fit_starts_its_own_update() -> None:
    batches = vectors(3)
    model = chain()
    trainer = trainer_of(model, batches[0], ["6", "4"], ["2"])
    trainer.fit(batches)
    middle = weights_of(model)
    trainer.fit(batches)
    update = trainer.update()
    assert set(update.deltas) == {"2.weight", "2.bias"}
    expected = model.state_dict()["2.weight"] - middle["2.weight"]
    assert np.array_equal(update.deltas["2.weight"], expected.numpy())


def test_weights_loaded_between_fits_are_the_base_of_the_next() -> None:
    batches = vectors(3)
    model = chain()
    trainer = trainer_of(model, batches[0], ["6"])
    trainer.fit(batches)
    fresh = weights_of(chain())
    model.load_state_dict(fresh)
    trainer.fit(batches)
    delta = trainer.update().deltas["6.weight"]
    assert np.array_equal(delta, (model.state_dict()["6.weight"] - fresh["6.weight"]).numpy())


def test_there_is_no_update_before_the_first_fit() -> None:
    with pytest.raises(TrainingError, match="before the first fit"):
        ElasticTrainer(chain(), loss_fn, sgd, budget=Budget()).update()


def test_tied_weights_travel_under_each_name() -> None:
    batches = vectors(3)
    model = TiedLinears()
    before = weights_of(model)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    update = trainer.update()
    assert set(update.deltas) == set(trainer.manifest.names)
    assert update.steps["second.weight"] == update.steps["first.weight"] == 3
    assert np.array_equal(update.deltas["first.weight"], update.deltas["second.weight"])
    assert np.array_equal(
        update.deltas["first.weight"], (model.first.weight.detach() - before["first.weight"])
    )


@pytest.mark.parametrize("make", [chain, TiedLinears, used_twice])
def test_a_client_alone_gives_the_server_its_own_model(make: type[nn.Module]) -> None:
    batches = vectors(4)
    model = make()
    server = deepcopy(model)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="full")
    trainer.fit(batches)
    manifest = Manifest.of(server)
    assert manifest.hash == trainer.manifest.hash
    mean = PartialMean(manifest)
    mean.add(decode(encode(trainer.update(), trainer.manifest), manifest))
    load_weights(server, manifest, mean.finish(arrays_of(server, manifest)))
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            assert torch.allclose(server.state_dict()[name], tensor, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_precision_hand_over_their_deltas(dtype: torch.dtype) -> None:
    batches = [(inputs.to(dtype), targets) for inputs, targets in vectors(3)]
    model = chain().to(dtype)
    before = weights_of(model)
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="head")
    trainer.fit(batches)
    update = trainer.update()
    expected: Tensor = model.state_dict()["6.weight"].double() - before["6.weight"].double()
    assert update.deltas["6.weight"] == pytest.approx(expected.numpy(), rel=1e-6)
    assert encode(update, trainer.manifest)
