"""The example of a method of one's own: found by an entry point, and conforming.

As a folder among the methods ``test_registry.py`` finds it.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from small_models import flat_profile, loss_fn, sgd, vectors
from torch import nn

from fl_elastic import registry
from fl_elastic.budget import Budget
from fl_elastic.planning import POLICIES, policies
from fl_elastic.testing import policy_checks
from fl_elastic.testing.subjects import Check, name_of
from fl_elastic.training import ElasticTrainer, Timing, TrainerOptions

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_method"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were installed: its entry point is known, and its modules can be imported."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    group = "fl_elastic.policies"
    named = [EntryPoint(n, value, group) for n, value in project["entry-points"][group].items()]

    def found(group: str) -> EntryPoints:
        return EntryPoints(named if group == "fl_elastic.policies" else [])

    monkeypatch.setattr(registry, "entry_points", found)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    # Other tests of this process look at all policies that are registered.
    POLICIES._entries.pop("taking_turns", None)
    for name in [each for each in sys.modules if each.split(".")[0] == "taking_turns"]:
        del sys.modules[name]


@pytest.mark.parametrize("check", policy_checks(), ids=name_of)
def test_it_conforms(check: Check, installed: None) -> None:
    assert "taking_turns" in policies()
    check(type(POLICIES.make("taking_turns")))


def test_the_halves_of_a_model_are_trained_in_turn(installed: None) -> None:
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5)) for _ in range(3)]
    model, batches = nn.Sequential(*body, nn.Linear(6, 3)), vectors(3)
    trainer = ElasticTrainer(
        model, loss_fn, sgd, budget=Budget(), policy="taking_turns",
        profile=flat_profile(model, batches[0]),
        options=TrainerOptions(timing=Timing(closed_loop=False)),
    )  # fmt: skip
    trained, dropped = [], list[float]()
    model[0][2].register_forward_hook(lambda layer, *_: dropped.append(layer.p))
    for _ in range(3):
        report = trainer.fit(batches)
        trained.append(sorted(trainer.update().deltas))
        assert report.based_on == "its turn"
    head, upper = ["3.bias", "3.weight"], ["2.0.bias", "2.0.weight"]
    lower = ["0.0.bias", "0.0.weight", "1.0.bias", "1.0.weight"]
    assert trained == [upper + head, lower + head, upper + head]
    # While it rests it drops nothing out, and afterwards it is as before.
    assert set(dropped[:3]) == {0.0} and set(dropped[3:6]) == {0.5}
    assert model[0][2].p == 0.5
