"""What travels has the names of the state, what trains those of the modules; values go into the live tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import plain_steps
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn.functional import cross_entropy

from fl_elastic import Budget, ElasticTrainer, fine_tune, forget
from fl_elastic.errors import ModelError
from fl_elastic.groups import tensor_groups
from fl_elastic.groups.model_state import ModelState
from fl_elastic.profiling import profile_model
from fl_elastic.streaming import ClosedForm, SampleStore, StreamLearner
from fl_elastic.training import apply_plan, changed, plan_for
from fl_elastic.training.model_head import solve_head
from fl_elastic.training.read_out import read_out
from fl_elastic.update import Manifest, load_weights, weights_of


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def checkpointed() -> nn.Module:
    """Its state hides the wrapper, its parameters' names do not."""
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)
    )
    for place in (0, 1, 4):
        model[place] = checkpoint_wrapper(model[place], checkpoint_impl=CheckpointImpl.NO_REENTRANT)  # type: ignore[no-untyped-call]
    return model


class Renamed(nn.Module):
    """Writes its state without the prefix of the module inside, as wrappers for distribution do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:
        return self.module.load_state_dict(state, *arguments, **options)


class OwnState(Renamed):
    """Takes no options where its state is asked for, and gives views of it."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return {f"net/{name}": each.detach() for name, each in self.module.state_dict().items()}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return self.module.load_state_dict(
            {name.removeprefix("net/"): each for name, each in state.items()}
        )


class Extra(nn.Module):
    """Keeps something else than parameters and buffers in its state."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.below, self.head, self.extra = nn.Linear(4, 8), nn.Linear(8, 2), extra

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.below(x)))
        return found

    def get_extra_state(self) -> Any:
        return self.extra.clone() if isinstance(self.extra, Tensor) else self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": checkpointed,
    "renamed": Renamed,
    "own state": OwnState,
    "extra dict": lambda: Extra({"scale": 3}),
    "extra None": lambda: Extra(None),
    "extra text": lambda: Extra("v1"),
    "extra tensor": lambda: Extra(torch.ones(3)),
    "tied": tied,
}


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(3)]


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in state.items() if isinstance(each, Tensor)}


def by_hand(model: nn.Module) -> dict[str, Tensor]:
    model.train()
    optimizer = sgd(model.parameters())
    plain_steps(model, optimizer, data())
    return tensors(model.state_dict())


@pytest.mark.parametrize("kind", MODELS)
def test_what_travels_are_the_tensors_of_the_state(kind: str) -> None:
    model = MODELS[kind]()
    manifest, state = Manifest.of(model), tensors(model.state_dict())
    assert list(manifest.names) == list(state)
    assert list(weights_of(model, manifest)) == list(state)
    for name, array in weights_of(model, manifest).items():
        np.testing.assert_array_equal(array, state[name].numpy())


@pytest.mark.parametrize("kind", MODELS)
def test_loading_writes_into_the_live_tensors(kind: str) -> None:
    model = MODELS[kind]()
    manifest, own = Manifest.of(model), list(model.parameters())
    weights = {name: array + 1 for name, array in weights_of(model, manifest).items()}
    load_weights(model, manifest, weights)
    assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
    for name, array in tensors(model.state_dict()).items():
        np.testing.assert_array_equal(array.numpy(), weights[name])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", ["full", "head", "last_k", "elastic"])
def test_an_update_is_what_changed_in_the_state(kind: str, policy: str) -> None:
    model = MODELS[kind]()
    reference = copy.deepcopy(model)
    before = tensors(model.state_dict())
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy=policy)
    trainer.fit(data())
    after, deltas = tensors(model.state_dict()), trainer.update().deltas
    for name, array in after.items():
        moved = (array - before[name]).numpy()
        if name in deltas:
            np.testing.assert_allclose(deltas[name], moved, rtol=1e-6, atol=1e-7)
        elif array.is_floating_point():
            assert not moved.any(), name
    if policy == "full":
        for name, array in by_hand(reference).items():
            torch.testing.assert_close(after[name], array)


@pytest.mark.parametrize("kind", MODELS)
def test_a_fit_that_fails_leaves_the_state_as_it_was(kind: str) -> None:
    model = MODELS[kind]()
    before = tensors(model.state_dict())
    broken = [*data(), (torch.full((6, 4), torch.nan), torch.zeros(6, dtype=torch.long))]
    trainer = ElasticTrainer(model, cross_entropy, sgd, budget=Budget(), policy="full")
    with pytest.raises(Exception, match="the loss is nan"):
        trainer.fit(broken)
    for name, array in tensors(model.state_dict()).items():
        torch.testing.assert_close(array, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [each for each in MODELS if each != "tied"])
def test_an_own_loop_and_a_solved_head_know_the_state_by_its_names(kind: str) -> None:
    model = MODELS[kind]()
    base = tensors(model.state_dict())
    plan = plan_for(model, cross_entropy, data(), budget=Budget(), policy="head")
    optimizer = sgd(model.parameters())
    with apply_plan(model, plan, optimizer):
        plain_steps(model, optimizer, data())
    update = changed(model, base, plan, steps=3, num_examples=18)
    head = [name for name in base if any(part in name for part in ("head.", "4.", "2."))]
    assert {*update.deltas} >= {each for each in head if "weight" in each} and len(
        update.deltas
    ) < 6
    _, weight = solve_head(model, data())
    assert weight in head


def test_views_that_show_other_numbers_are_told_apart() -> None:
    """Two buffers in one piece of memory, and a state that gives copies of both."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.arange(6.0)
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("one", both[:3])
            self.register_buffer("other", both[3:])

        def state_dict(self) -> Any:  # type: ignore[override]
            return {name: each.detach() for name, each in self.named_buffers()}

    model = Shared()
    state = ModelState.of(model)
    assert state.tensors["one"] is model.one and state.tensors["other"] is model.other


def test_a_model_without_shapes_is_refused_in_one_sentence_everywhere(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    batch = (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    with SampleStore(tmp_path / "samples.db", 2**20) as store:
        ways: list[Callable[[], object]] = [
            lambda: Manifest.of(model),
            lambda: tensor_groups(model, cross_entropy, batch),
            lambda: profile_model(model, cross_entropy, batch),
            lambda: ElasticTrainer(model, cross_entropy, sgd, budget=Budget()).fit([batch]),
            lambda: fine_tune(model, cross_entropy, sgd, [batch]),
            lambda: read_out(model, [batch]),
            lambda: forget(model, cross_entropy, [batch], [batch, batch]),
            lambda: StreamLearner(model, store, head=ClosedForm(), state_dir=tmp_path),
        ]
        for way in ways:
            with pytest.raises(ModelError, match=r"'0\.weight' has no shape yet: run the model on"):
                way()
