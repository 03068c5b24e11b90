"""Policies, scores and rules as objects, with options that are checked when they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg
from small_models import chain, flat_profile, loss_fn, sgd, vectors
from torch import nn

from fl_elastic import Budget, ElasticTrainer
from fl_elastic.aggregation import RULES, PartialMean
from fl_elastic.errors import PlanError, RegistryError
from fl_elastic.flower import PartialUpdates
from fl_elastic.methods.gradient_filter.policy import GradientFilterPolicy
from fl_elastic.methods.tinytrain.policy import TinyTrainPolicy
from fl_elastic.planning import POLICIES, Plan, PlanRequest, Policy
from fl_elastic.planning.importance import IMPORTANCES, Importance
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.update import Manifest, PartialUpdate


class Second(Policy):
    """Trains the group that its option says."""

    def __init__(self, group: int) -> None:
        self.group = group

    def plan(self, request: PlanRequest) -> Plan:
        mask = np.zeros(len(request.profile), dtype=bool)
        mask[self.group] = True
        return request.plan_of_mask("second", mask)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_trainer_takes_a_policy_with_options(group: int) -> None:
    model, batches = chain(), vectors(3)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(), policy=Second(group),
        profile=flat_profile(model, batches[0]),
    )  # fmt: skip
    names = trainer.fit(batches).plan.groups[group].parameters
    assert set(trainer.update().deltas) == set(names)


def test_importance_may_be_an_object() -> None:
    class Last(Importance):
        batches_needed = 1
        asked = 0

        def score(self, probe: Any) -> Any:
            Last.asked += 1
            return np.arange(len(probe.groups), dtype=float)

    model, batches = chain(), vectors(20)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(speedup=1.5),
        profile=flat_profile(model, batches[0]),
        options=TrainerOptions(importance=Last(), full_update_every=0, timing=Timing(closed_loop=False)),
    )  # fmt: skip
    report = trainer.fit(batches)
    assert Last.asked == 1 and report.based_on == "measured importance"


def test_a_rule_may_be_an_object() -> None:
    model = nn.Linear(2, 1)
    manifest = Manifest.of(model)
    base = {name: value.numpy() for name, value in model.state_dict().items()}
    found = []
    for rule in ("median", RULES.make("median")):
        mean = PartialMean(manifest, rule)
        for change in (1.0, 2.0, 30.0):
            deltas = {name: np.full_like(value, change) for name, value in base.items()}
            mean.add(PartialUpdate(deltas, dict.fromkeys(deltas, 1), 10, 0))
        found.append(mean.finish(base))
    assert all(np.array_equal(found[0][name], found[1][name]) for name in base)
    assert np.allclose(found[0]["bias"], base["bias"] + 2)
    assert PartialUpdates(FedAvg(), rule=RULES.make("median")).rule is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Second, "policy Second is a class: give a name or an object, as in Second()"),
        (3, "policy 3 is a int: give a name or an object"),
        (None, "policy None is a NoneType"),
        ("elastik", "did you mean 'elastic'"),
    ],
)
def test_what_is_no_policy_is_refused_when_it_is_given(given: Any, said: str) -> None:
    with pytest.raises(RegistryError) as caught:
        ElasticTrainer(chain(), loss_fn, sgd, budget=Budget(), policy=given)
    assert said in str(caught.value)
    with pytest.raises(RegistryError):
        TrainerOptions(importance=given)
    with pytest.raises(RegistryError):
        PartialUpdates(FedAvg(), rule=given) if given is not None else RULES.make(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GradientFilterPolicy(layers=0),
        lambda: GradientFilterPolicy(patch=1),
        lambda: TinyTrainPolicy(macs_share=0.0),
        lambda: TinyTrainPolicy(macs_share=1.5),
    ],
)
def test_options_without_a_meaning_are_refused(make: Any) -> None:
    with pytest.raises(PlanError):
        make()


@pytest.mark.parametrize(("layers", "patch"), [(1, 2), (3, 4), (9, 3)])
def test_as_many_layers_are_filtered_as_asked_for(layers: int, patch: int) -> None:
    convolutions = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(6)]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4 * 64, 3))
    batches = [(torch.randn(4, 4, 8, 8), torch.tensor([0, 1, 2, 0]))] * 2
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(), policy=GradientFilterPolicy(layers, patch)
    )
    kinds = [mode for mode in trainer.fit(batches).plan.modes if mode.kind == "filtered"]
    assert len(kinds) == min(layers, 6) and {mode.patch for mode in kinds} == {patch}


def test_names_of_plug_ins() -> None:
    assert POLICIES.name_of("elastic") == "elastic"
    assert POLICIES.name_of(POLICIES.make("tinytrain_in")) == "tinytrain_in"
    assert IMPORTANCES.name_of(IMPORTANCES.make("fisher")) == "fisher"
