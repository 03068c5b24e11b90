"""What goes wrong while training is one clear line, and leaves the model as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_models import (
    chain,
    conv_net,
    elastic_trainer,
    images,
    loss_fn,
    same_weights,
    sgd,
    vectors,
    weights_of,
)

from fl_elastic.budget import Budget
from fl_elastic.errors import SettingError, TrainingError
from fl_elastic.training import ElasticTrainer, TrainerOptions


@pytest.mark.parametrize("switched_off", [torch.no_grad, torch.inference_mode])
def test_gradients_must_be_on(switched_off: Any) -> None:
    model = chain()
    before = weights_of(model)
    with switched_off(), pytest.raises(TrainingError, match="gradients are switched off"):
        ElasticTrainer(model, loss_fn, sgd, budget=Budget()).fit(vectors(2))
    assert same_weights(before, model)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("broken", [0, 1, 3])
def test_a_batch_without_finite_loss_puts_the_model_back(broken: int, value: float) -> None:
    batches = images(4)
    model = conv_net()
    model[1].eval()
    model[3].bias.requires_grad_(False)
    trainer = elastic_trainer(model, batches[0], Budget(speedup=1.2))
    batches[broken] = (torch.full_like(batches[broken][0], value), batches[broken][1])
    before = weights_of(model)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    with pytest.raises(TrainingError) as caught:
        trainer.fit(batches)
    assert "\n" not in str(caught.value) and "NaN" in str(caught.value)
    assert same_weights(before, model)
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    assert modes == [module.training for module in model.modules()]
    assert trainer.update().deltas == {}


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    "bad",
    [
        (torch.randn(8, 5), torch.zeros(8, dtype=torch.long)),
        (torch.randn(8, 6), torch.zeros(7, dtype=torch.long)),
        (torch.randn(8, 6), torch.full((8,), 3)),
        (torch.randn(8, 6),),
        torch.randn(8, 6),
    ],
    ids=["features", "targets", "class", "single", "no pair"],
)
def test_a_batch_that_does_not_fit_is_one_line_and_puts_the_model_back(at: int, bad: Any) -> None:
    batches: list[Any] = vectors(4)
    batches[at] = bad
    model = chain()
    before = weights_of(model)
    with pytest.raises(TrainingError) as caught:
        ElasticTrainer(model, loss_fn, sgd, budget=Budget()).fit(batches)
    assert "\n" not in str(caught.value)
    assert same_weights(before, model)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_overflows_makes_no_update(value: float) -> None:
    model = chain()
    trainer = ElasticTrainer(model, loss_fn, sgd, budget=Budget(), policy="head")
    trainer.fit(vectors(2))
    with torch.no_grad():
        model.get_parameter("6.weight").fill_(value)
    with pytest.raises(TrainingError, match=r"'6.weight' is no longer finite.*learning rate"):
        trainer.update()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"full_update_every": -1}, "full_update_every"),
        ({"full_update_every": 1.5}, "full_update_every 1.5 must be a whole number"),
        ({"accumulate": 0}, "accumulate 0 must be .*at least 1"),
        ({"accumulate": 1.5}, "accumulate 1.5 must be a whole number"),
        ({"accumulate": "2"}, "accumulate '2' must be a whole number"),
        ({"accumulate": math.inf}, "accumulate inf must be a whole number"),
        ({"proximal": -1.0}, "proximal -1"),
        ({"proximal": "2"}, "proximal '2' must be a number"),
        ({"proximal": True}, "proximal True must be a number"),
        ({"seed": 1.5}, "seed 1.5 must be a whole number"),
        ({"seed": None}, "seed None must be a whole number"),
    ],
)
def test_impossible_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        TrainerOptions(**settings)
