"""What a user's strategy, or Flower's own, keeps in its attributes is there again after a restart."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    PrivacyConfig,
    PrivacySpent,
    SamplingMethod,
)
from scripted_clients import first_arrays, manifest, scripts
from small_federation import assert_identical, quiet, run, scripted_app

from fl_elastic.errors import CheckpointError
from fl_elastic.flower import Checkpointed, PartialUpdates
from fl_elastic.flower.kept_values import NotKeptError, form_of, from_fact, to_fact

ROUNDS = 4


class Interrupted(Exception):
    """Stands for a crash of the server's process."""


def trained(strategy: Strategy, dies: int = 0, rounds: int = ROUNDS) -> ArrayRecord:
    def equal(update: Any) -> Any:
        # An accounted strategy refuses weights that differ.
        return lambda weights, version: replace(update(weights, version), num_examples=6)

    def crash(server_round: int, arrays: ArrayRecord) -> None:
        if dies and server_round == dies:
            raise Interrupted

    apps = {node: scripted_app(manifest(), equal(update)) for node, update in scripts().items()}
    return run(strategy, apps, first_arrays(), rounds, evaluate_fn=crash)[0].arrays


class Remembers(FedAvg):
    """Scales what it merges by numbers that it keeps in the ways in which users keep them."""

    names = "none"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.times: dict[int, int] = {}
        self.controls: dict[int, dict[str, Any]] = {}
        self.pair: tuple[int, ...] = ()
        self.seen: set[int] = set()
        self.drawn, self.drawn_too = np.random.default_rng(0), random.Random(0)
        self.last: MetricRecord | None = None
        self.rate = np.float32(1.0)
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.Adam([self.weight], 0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        self.losses.append(float(server_round))
        self.recent.append(server_round)
        self.seen.add(server_round)
        self.pair = (server_round, len(self.losses))
        self.times[7] = self.times.get(7, 0) + 1
        self.names = "x" * server_round
        self.last = MetricRecord({"x": [float(len(self.losses))] * 2})
        self.rate *= np.float32(0.9)
        self.weight.grad = torch.full((2,), 1.0 / server_round)
        self.optimizer.step()
        self.schedule.step()
        own = self.controls.setdefault(3, {"sum": np.zeros(2), "of": []})
        own["sum"] = own["sum"] + self.drawn.random(2) + self.drawn_too.random()
        own["of"].append(np.ones(1))
        told = [
            sum(self.losses), sum(self.recent), self.times[7], own["sum"].sum(), len(own["of"]),
            self.pair[1], len(self.seen), len(self.names), self.rate, np.sum(self.last["x"]),
            self.optimizer.state[self.weight]["exp_avg"].sum(), self.schedule.get_last_lr()[0],
            self.weight.detach().sum(),
        ]  # fmt: skip
        share = np.float32(1 + 1e-3 * sum(float(each) for each in told))
        return ArrayRecord({n: Array(share * each.numpy()) for n, each in arrays.items()}), metrics


class Plateau(FedAvg):
    """Shortens its steps after each test."""

    def __init__(self, **options: Any) -> None:
        super().__init__(fraction_evaluate=1.0, **options)
        self.share = 1.0

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        share = np.float32(self.share)
        return ArrayRecord({n: Array(share * each.numpy()) for n, each in arrays.items()}), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
        self.share *= 0.5
        return super().aggregate_evaluate(server_round, replies)


@pytest.mark.parametrize("make", [lambda: quiet(Remembers), lambda: Plateau(min_available_nodes=4)])
def test_a_users_strategy_goes_on_with_what_it_had_in_its_attributes(
    make: Any, tmp_path: Path
) -> None:
    whole = trained(PartialUpdates(make()))
    for dies in range(1, ROUNDS):
        folder = tmp_path / str(dies)
        with pytest.raises(Interrupted):
            trained(Checkpointed(PartialUpdates(make()), folder), dies)
        assert_identical(trained(Checkpointed(PartialUpdates(make()), folder)), whole)


class Holds(FedAvg):
    """Has data of its own, and directions that are drawn anew in each process."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self.data = np.ones(100_000)
        self.directions = np.random.default_rng(seed).random(3)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        self.directions = self.directions + 1.0
        return super().aggregate_train(server_round, replies)


def test_arrays_are_kept_where_they_have_changed(tmp_path: Path) -> None:
    least = {"fraction_evaluate": 0.0, "min_available_nodes": 4}
    first, again = Holds(1, **least), Holds(2, **least)
    trained(Checkpointed(PartialUpdates(first), tmp_path), rounds=2)
    assert all(path.stat().st_size < 100_000 for path in tmp_path.iterdir())
    trained(Checkpointed(PartialUpdates(again), tmp_path), rounds=3)
    assert again.directions.tolist() == (first.directions + 1.0).tolist()


class Accountant:
    """Adds up what each release costs, as Flower's accountant does by a package of its own."""

    def __init__(self, most: float) -> None:
        self.config = PrivacyConfig(
            1e-5, 4, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION, most
        )
        self.num_releases = 0

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        self.num_releases += count

    def would_exceed(self, event: GaussianPrivacyEvent) -> bool:
        return self.num_releases + 1 > float(self.config.max_epsilon or 0)

    def get_privacy_spent(self) -> PrivacySpent:
        return PrivacySpent(float(self.num_releases), 1e-5, self.num_releases, "sum")

    def state_dict(self) -> dict[str, object]:
        return {"most": self.config.max_epsilon, "releases": self.num_releases}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if state["most"] != self.config.max_epsilon:
            raise ValueError("of another configuration")
        self.num_releases = int(str(state["releases"]))


def private(most: float) -> tuple[Accountant, PartialUpdates]:
    accountant = Accountant(most)
    inner = DifferentialPrivacyServerSideFixedClipping(
        quiet(min_train_nodes=4), 0.1, 0.5, 4, accountant=cast(PrivacyAccountant, accountant)
    )
    return accountant, PartialUpdates(inner)


def test_privacy_that_was_spent_before_a_restart_counts_after_it(tmp_path: Path) -> None:
    accountant, strategy = private(9.0)
    trained(Checkpointed(strategy, tmp_path), rounds=2)
    assert accountant.num_releases == 2
    resumed, strategy = private(9.0)
    trained(Checkpointed(strategy, tmp_path), rounds=3)
    assert resumed.num_releases == 3


def test_a_privacy_budget_holds_over_a_restart(tmp_path: Path) -> None:
    trained(Checkpointed(private(2.0)[1], tmp_path), rounds=2)
    with pytest.raises(Exception, match="would exceed max_epsilon"):
        trained(Checkpointed(private(2.0)[1], tmp_path), rounds=3)
    with pytest.raises(CheckpointError, match="of another configuration"):
        trained(Checkpointed(private(5.0)[1], tmp_path), rounds=3)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**200, 0.1, float("inf"), "x", [1, [2.5]], (1, "x"), {1: {"x": None}}, {(1, 2): 3},
        {3, 1}, deque([1, 2], maxlen=2), MetricRecord({"x": [1, 2]}), {}, {True: 1, "1": 2},
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = from_fact(to_fact(value, {}), {})
    assert type(found) is type(value)
    assert found == value
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)


def test_arrays_and_tensors_come_back_in_their_places() -> None:
    arrays: dict[str, Any] = {}
    half = torch.ones(2, dtype=torch.bfloat16)
    value = {1: [np.arange(3), half], "1": np.float32(0.1), 2: {"x/y!": np.zeros(())}}
    found = from_fact(to_fact(value, arrays), arrays)
    assert found[1][0].tolist() == [0, 1, 2]
    assert torch.equal(found[1][1], half) and found[1][1].dtype is torch.bfloat16
    assert found["1"] == np.float32(0.1) and found["1"].dtype == np.float32
    assert found[2]["x/y!"].shape == ()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        [object()],
        torch.nn.Linear(1, 1),
        np.array("x"),
        torch.ones(1).requires_grad_(),
    ],
)
def test_anything_else_is_not_kept(value: Any) -> None:
    with pytest.raises(NotKeptError):
        to_fact(value, {})


def test_an_impossible_fact_has_a_form_of_its_own() -> None:
    assert form_of({}) == ""
