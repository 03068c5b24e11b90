"""Rules for unequal clients in rounds of Flower: probabilities, server optimisers, Krum, FedProx, channels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM
from scripted_clients import EXAMPLES, first_arrays, first_weights, manifest, scripts
from small_federation import (
    UpdateOf,
    Weights,
    as_record,
    as_weights,
    assert_close,
    build,
    elastic_client,
    legacy_app,
    local_data,
    quiet,
    run,
    scripted_app,
)
from small_models import loss_fn
from torch import nn

from fl_elastic import Budget
from fl_elastic.aggregation import SERVER_OPTIMIZERS
from fl_elastic.errors import BudgetError, UpdateError
from fl_elastic.flower import Deadline, PartialUpdates, RoundRecord
from fl_elastic.flower.records import PACKED, read_train_reply
from fl_elastic.update import Manifest, PartialUpdate, decode, weights_of
from fl_elastic.update.model_wire import encode_weights
from fl_elastic.update.partial import trained_part


def trained(strategy: PartialUpdates, by_node: dict[int, UpdateOf], rounds: int) -> Weights:
    apps = {node: scripted_app(manifest(), update) for node, update in by_node.items()}
    return as_weights(run(strategy, apps, first_arrays(), rounds)[0].arrays)


def in_turns() -> dict[int, UpdateOf]:
    """Node 1 trains "stem.weight" in every round, node 2 in every third one, the others never."""

    def script(node: int) -> UpdateOf:
        everything = scripts(everything=True)[node]

        def update(weights: Weights, version: int) -> PartialUpdate:
            whole = everything(weights, version)
            takes_part = node == 1 or (node == 2 and version % 3 == 0)
            names = {"head.weight", "stem.weight"} if takes_part else {"head.weight"}
            deltas = {name: whole.deltas[name] for name in whole.deltas if name in names}
            steps = {name: whole.steps[name] for name in deltas}
            return PartialUpdate(deltas, steps, whole.num_examples, version)

        return update

    return {node: script(node) for node in EXAMPLES}


def test_updates_are_weighed_by_how_often_the_client_lately_trained_the_tensor() -> None:
    rounds = 7
    strategy = PartialUpdates(quiet(), rule="inverse_probability")
    found = trained(strategy, in_turns(), rounds)
    weight = first_weights()["stem.weight"].astype(np.float64)
    hits, seen = dict.fromkeys(EXAMPLES, 0.0), dict.fromkeys(EXAMPLES, 0.0)
    for version in range(1, rounds + 1):
        others = {**first_weights(), "stem.weight": weight.astype(np.float32)}
        total, contributed = np.zeros_like(weight), 0.0
        for node, update_of in in_turns().items():
            update = update_of(others, version)
            takes_part = "stem.weight" in update.deltas
            share = max((hits[node] + 1) / (seen[node] + 1), 0.2)
            seen[node], hits[node] = 0.95 * seen[node] + 1, 0.95 * hits[node] + takes_part
            if takes_part:
                total += EXAMPLES[node] / share * update.deltas["stem.weight"]
                contributed += EXAMPLES[node] / share
        change = total / max(contributed, sum(EXAMPLES.values()))
        weight = (weight + change).astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(found["stem.weight"], weight, rtol=1e-5, atol=1e-6)
    plain = trained(PartialUpdates(quiet(), rule="all"), in_turns(), rounds)
    assert np.abs(plain["stem.weight"] - found["stem.weight"]).max() > 0.01


TWINS: dict[str, tuple[Callable[[], FedAvg], str, float]] = {
    "adam": (lambda: quiet(FedAdam, eta=0.02, beta_1=0.9, beta_2=0.99, tau=1e-3), "adam", 0.02),
    "momentum": (lambda: quiet(FedAvgM, server_momentum=0.9), "momentum", 1.0),
    "none": (lambda: quiet(FedAvg), "sgd", 1.0),
}


@pytest.mark.parametrize("name", TWINS)
def test_where_every_tensor_is_trained_lazy_optimizers_are_flowers(name: str) -> None:
    flowers, lazy, rate = TWINS[name]
    whole = scripts(everything=True)
    expected = trained(PartialUpdates(flowers()), whole, 5)
    strategy = PartialUpdates(quiet(), server_optimizer=SERVER_OPTIMIZERS.make(lazy, rate))
    assert_close(trained(strategy, whole, 5), expected, rtol=1e-4, atol=1e-5)


def test_a_lazy_optimizer_leaves_alone_what_nobody_trains_any_more() -> None:
    """Flower's goes on along its momentum."""

    def stop(node: int) -> UpdateOf:
        everything, few = scripts(everything=True)[node], scripts()[node]
        return lambda weights, version: (everything if version < 3 else few)(weights, version)

    by_node = {node: stop(node) for node in EXAMPLES}

    def moves(strategy: Callable[[], PartialUpdates]) -> bool:
        early, late = (trained(strategy(), by_node, rounds) for rounds in (2, 5))
        return not np.array_equal(early["untouched"], late["untouched"])

    assert not moves(
        lambda: PartialUpdates(quiet(), server_optimizer=SERVER_OPTIMIZERS.make("adam"))
    )
    assert moves(lambda: PartialUpdates(quiet(FedAdam)))


def test_krum_on_ragged_replies_moves_what_has_a_quorum_and_says_what_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records: list[RoundRecord] = []
    apps = {node: scripted_app(manifest(), scripts()[node]) for node in EXAMPLES}
    with caplog.at_level(logging.WARNING):
        strategy = PartialUpdates(quiet(), rule="krum", on_round=records.append)
        result, _ = run(strategy, apps, first_arrays(), 1)
    found, start = as_weights(result.arrays), first_weights()
    # All four trained the head, at most two anything else.
    models = [start["head.weight"] + s(start, 1).deltas["head.weight"] for s in scripts().values()]
    assert any(np.allclose(found["head.weight"], model, atol=1e-6) for model in models)
    assert all(np.array_equal(found[n], start[n]) for n in start if n != "head.weight")
    assert records[0].stayed == {"stem.weight": 1, "stem.bias": 2, "scale": 2}
    assert len(records[0].accepted) == 4
    assert "3 tensors stay" in caplog.text


def test_a_lazy_optimizer_does_not_move_what_stays() -> None:
    strategy = PartialUpdates(quiet(), rule="krum", server_optimizer=SERVER_OPTIMIZERS.make("adam"))
    found = trained(strategy, scripts(), 2)
    moved = {n for n, array in first_weights().items() if not np.array_equal(found[n], array)}
    assert moved == {"head.weight"}


MU = 3.0


def by_hand(names: set[str], mu: float, epochs: int) -> dict[str, np.ndarray]:
    """SGD with momentum on the named parameters, by the formulas alone."""
    model = build("none")
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in start.items()}
    for _ in range(epochs):
        for inputs, targets in local_data(2):
            model.zero_grad()
            loss_fn(model(inputs), targets).backward()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in names:
                        assert parameter.grad is not None
                        gradient = parameter.grad + mu * (parameter - start[name])
                        velocity[name] = 0.9 * velocity[name] + gradient
                        parameter -= 0.05 * velocity[name]
    return {name: (p.detach() - start[name]).numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("policy", ["full", "head"])
def test_fedprox_pulls_trained_tensors_and_no_others(policy: str) -> None:
    known = Manifest.of(build("none"))
    data = [np.frombuffer(encode_weights(weights_of(build("none"), known), known), np.uint8)]

    def deltas(**config: Any) -> Weights:
        made = elastic_client(build("none"), 2, policy, epochs=3)
        arrays, examples, metrics = made.fit(data, {PACKED: True, **config})
        assert examples, metrics
        return decode(arrays[0].tobytes(), known).deltas

    plain, pulled = deltas(), deltas(**{"proximal-mu": MU})
    assert set(plain) == set(pulled)
    assert (set(pulled) == set(known.names)) is (policy == "full")
    expected = by_hand(set(pulled), MU, epochs=3)
    for name, delta in pulled.items():
        np.testing.assert_allclose(delta, expected[name], rtol=2e-4, atol=2e-6, err_msg=name)
    assert max(np.abs(pulled[name] - plain[name]).max() for name in pulled) > 1e-3


@pytest.mark.parametrize("value", [-1.0, "0.1", float("nan")])
@pytest.mark.parametrize("key", ["lr", "proximal-mu"])
def test_a_setting_of_the_server_that_is_no_number_from_0_is_refused(key: str, value: Any) -> None:
    model = build("none")
    data = list(weights_of(model, Manifest.of(model)).values())
    with pytest.raises(UpdateError, match=f"config {key} = .* is not a number from 0"):
        elastic_client(model, 2, "full").fit(data, {key: value})


def wide() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["tinytrain", "joint", "sparse_update"])
def test_channels_that_no_client_trained_stay_bit_for_bit(policy: str) -> None:
    known = Manifest.of(wide())
    trained_somewhere = {name: np.zeros(known.shape(name), dtype=bool) for name in known.names}
    parts = []

    def noted(reply: Message) -> Message:
        update = decode(read_train_reply(reply.content).packed, known)
        parts.append(set(update.parts))
        for name in update.deltas:
            part = trained_part(update, name)
            trained_somewhere[name] |= np.array(True) if part is None else part
        return reply

    whole = sum(4 * p.numel() for p in wide().parameters())
    made = {
        node: elastic_client(wide(), node, policy, budget=Budget(uplink=0.3 * whole))
        for node in (1, 2)
    }
    apps = {node: legacy_app(lambda node=node: made[node]) for node in made}
    records: list[RoundRecord] = []
    start = weights_of(wide(), known)
    strategy = PartialUpdates(quiet(nodes=2), on_round=records.append)
    found, _ = run(strategy, apps, as_record(start), 1, alter=noted)
    assert len(records[0].accepted) == 2
    assert all(parts)
    for name, array in as_weights(found.arrays).items():
        others = ~trained_somewhere[name]
        assert np.array_equal(array[others], start[name][others]), name
        if trained_somewhere[name].any():
            assert not np.array_equal(array, start[name]), name


def test_the_preset_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "flwr"):
        strategy = PartialUpdates.for_unequal_devices(FedAvg())
    assert "agreement at 1.5" in caplog.text and "quantile=0.25" in caplog.text
    assert strategy.config.needs_capabilities and strategy.merges_late
    fixed = PartialUpdates.for_unequal_devices(FedAvg(), deadline=Deadline(seconds=9))
    assert fixed.config.deadline == Deadline(seconds=9)
    with pytest.raises(BudgetError):
        PartialUpdates.for_unequal_devices(FedAvg(), deadline=-1)
