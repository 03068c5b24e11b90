"""Peers that choose layers: whole rounds of two clients, written out by hand."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from peer_tasks import assert_close, by_hand, known_costs, merged, task_of, weights
from small_models import Residual, chain, conv_net, images, vectors
from torch import nn

from fl_elastic.planning.importance import IMPORTANCES, Probe
from fl_elastic.testing import made_up_profile
from fl_elastic_simulations.peers import PEERS, elastictrainer, published_selection
from fl_elastic_simulations.peers.fedpart import layer_in_turn, layers_of
from fl_elastic_simulations.peers.random_layers import random_mask
from fl_elastic_simulations.peers.timelyfl import deepest_suffix

EVERY = [f"{layer}.{kind}" for layer in (0, 2, 4, 6) for kind in ("weight", "bias")]
# A step of the chain: 2 s forward; each of its four linear layers and three activations passes the error on for
# 1 s (but the first layer, whose input needs none), the loss three, and each layer takes 1 s for its own gradient.
FULL, HEAD = 15.0, 6.0


def named(*layers: int) -> list[str]:
    return [name for name in EVERY if int(name[0]) in layers]


def test_the_costs_are_as_the_tests_assume() -> None:
    profile = known_costs(chain(), vectors()[0])
    assert profile.group_names == ("6", "4", "2", "0")
    assert profile.full_step_seconds == FULL and profile.floor_step_seconds == HEAD


def test_full_steps_takes_fewer_steps_on_the_slow_client() -> None:
    model, fast, slow = chain(), vectors(4, seed=1), vectors(4, size=4, seed=2)
    profile, peer = known_costs(model, fast[0]), PEERS.make("full_steps")
    results = [
        peer.train(task_of(deepcopy(model), data, profile=profile, allowed_seconds=allowed))
        for data, allowed in ((fast, 4 * FULL), (slow, 2.5 * FULL))
    ]
    assert [result.steps for result in results] == [4, 2]
    assert [result.host_seconds for result in results] == [4 * FULL, 2 * FULL]
    one, two = by_hand(model, fast, EVERY, 4), by_hand(model, slow, EVERY, 2)
    # 32 examples against 16.
    expected = {name: (2 * one[name] + two[name]) / 3 for name in EVERY}
    assert_close(merged(peer, model, results), expected)


@pytest.mark.parametrize(
    ("server_round", "layers"),
    [(1, (0, 2, 4, 6)), (5, (0, 2, 4, 6)), (6, (0,)), (7, (0,)), (8, (2,)), (13, (6,)), (14, (0,))],
)
def test_fedpart_trains_the_same_layer_everywhere(
    server_round: int, layers: tuple[int, ...]
) -> None:
    model, data = chain(), [vectors(3, seed=seed) for seed in (1, 2)]
    peer, trained = PEERS.make("fedpart"), named(*layers)
    results = [
        peer.train(task_of(deepcopy(model), d, server_round=server_round, client=index))
        for index, d in enumerate(data)
    ]
    assert all(sorted(result.update.deltas) == sorted(trained) for result in results)
    one, two = (by_hand(model, d, trained, 3) for d in data)
    after = merged(peer, model, results)
    assert_close(after, {name: (one[name] + two[name]) / 2 for name in trained})
    assert_close(after, {name: weights(model)[name] for name in weights(model)} | {
        name: (one[name] + two[name]) / 2 for name in trained
    })  # fmt: skip


def test_fedpart_takes_fewer_steps_where_its_layer_is_dear() -> None:
    # The first layer needs the whole way back: all but the gradients of the three others.
    task = task_of(chain(), vectors(4), server_round=6, allowed_seconds=3 * (FULL - 3))
    result = PEERS.make("fedpart").train(task)
    assert result.steps == 3 and result.host_seconds == 3 * (FULL - 3)


def test_layers_are_operations_with_their_norm() -> None:
    profile = known_costs(conv_net(), images()[0])
    names = [[profile.group_names[g] for g in layer] for layer in layers_of(profile.graph)]
    assert names == [["0", "1"], ["3", "4"], ["6", "7"], ["11"]]
    residual = known_costs(Residual(), images()[0]).graph
    turns = {layer_in_turn(residual, number) for number in range(6, 14)}
    assert sorted(turns) == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("allowed", "layers", "epochs"),
    [
        (math.inf, (0, 2, 4, 6), 3),
        (100 * 4 * FULL, (0, 2, 4, 6), 6),
        (4 * 4 * FULL, (0, 2, 4, 6), 4),
        (4 * FULL, (0, 2, 4, 6), 1),
        (4 * FULL - 1, (2, 4, 6), 1),
        (4 * 9.0, (4, 6), 1),
        (4 * HEAD, (6,), 1),
    ],
)
def test_timelyfl_turns_time_into_epochs_or_into_layers(
    allowed: float, layers: tuple[int, ...], epochs: int
) -> None:
    model, data = chain(), vectors(4)
    task = task_of(deepcopy(model), data, epochs=3, allowed_seconds=allowed)
    result = PEERS.make("timelyfl").train(task)
    assert result.steps == 4 * epochs and result.requested_steps == 12
    assert result.host_seconds <= allowed
    trained = named(*layers)
    assert_close(weights(task.model), by_hand(model, data, trained, 4 * epochs))
    assert sorted(result.update.deltas) == sorted(trained)


def test_timelyfl_trains_the_head_in_fewer_steps_if_not_even_it_fits() -> None:
    result = PEERS.make("timelyfl").train(task_of(chain(), vectors(4), allowed_seconds=2.5 * HEAD))
    assert result.steps == 2 and sorted(result.update.deltas) == named(6)[::-1]


@pytest.mark.parametrize("seed", range(5))
def test_the_suffix_is_the_longest_that_fits(seed: int) -> None:
    profile = made_up_profile(groups=9, branched=bool(seed % 2), seed=seed)
    for share in (0.4, 0.6, 0.8, 1.0):
        mask = deepest_suffix(profile, share * profile.full_step_seconds)
        counts = [
            count for count in range(1, 10)
            if profile.step_seconds(np.arange(9) < count) <= share * profile.full_step_seconds
        ]  # fmt: skip
        assert mask.sum() == max(counts, default=1)


def test_random_layers_uses_the_time_up_and_varies() -> None:
    profile = made_up_profile(groups=9, branched=True)
    allowed = 0.8 * profile.full_step_seconds
    masks = [random_mask(profile, allowed, np.random.default_rng(seed)) for seed in range(40)]
    assert len({mask.tobytes() for mask in masks}) > 10
    for mask in masks:
        assert profile.step_seconds(mask) <= allowed
        for left_out in np.flatnonzero(~mask):
            more = mask.copy()
            more[left_out] = True
            assert profile.step_seconds(more) > allowed
    trained = np.mean(masks, axis=0)
    assert trained.min() > 0 and trained.max() < 1


def test_random_layers_differ_between_clients_and_rounds_and_merge_by_contributor() -> None:
    model, data = chain(), [vectors(3, seed=seed) for seed in (1, 2)]
    peer = PEERS.make("random_layers")
    results = [
        peer.train(task_of(deepcopy(model), d, allowed_seconds=3 * 13.0, client=index))
        for index, d in enumerate(data)
    ]
    expected = {}
    finals = [
        by_hand(model, d, list(r.update.deltas), 3) for d, r in zip(data, results, strict=True)
    ]
    for name in EVERY:
        own = [final[name].numpy() for final in finals if name in final]
        expected[name] = np.mean(own, axis=0) if own else weights(model)[name]
    assert_close(merged(peer, model, results), expected)
    sets = {
        frozenset(peer.train(
            task_of(chain(), vectors(1), allowed_seconds=13.0, client=client, server_round=number)
        ).update.deltas)
        for client in range(4) for number in range(1, 4)
    }  # fmt: skip
    assert len(sets) > 2


def test_elastictrainer_selects_by_epoch_and_is_averaged_over_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks = []

    def noting(*arguments: Any, **options: Any) -> Any:
        masks.append(published_selection(*arguments, **options))
        return masks[-1]

    monkeypatch.setattr(elastictrainer, "published_selection", noting)
    model, data = chain(), [vectors(3, seed=seed) for seed in (1, 2)]
    profile, peer = known_costs(model, data[0][0]), PEERS.make("elastictrainer")
    allowed = 2 * 3 * 13.5
    results = [
        peer.train(task_of(deepcopy(model), d, epochs=2, profile=profile, allowed_seconds=seconds))
        for d, seconds in ((data[0], math.inf), (data[1], allowed))
    ]
    steps = set(results[1].update.steps.values())
    assert results[1].steps == 6 and steps <= {3, 6}
    # The slow client selects twice, each time after two passes over a batch.
    training = sum(3 * profile.step_seconds(mask) for mask in masks)
    assert len(masks) == 2 and training <= allowed
    assert results[1].host_seconds == pytest.approx(2 * 2 * FULL + training)
    after, before = merged(peer, model, results), weights(model)
    fast = by_hand(model, data[0], EVERY, 6)
    for name in EVERY:
        slow = results[1].update.deltas.get(name, 0.0)
        expected = before[name] + (fast[name].numpy() - before[name] + slow) / 2
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-7)


def test_elastictrainer_trains_what_its_solver_selects() -> None:
    model, data = chain(), vectors(3, seed=4)
    profile = known_costs(model, data[0])
    task = task_of(deepcopy(model), data, profile=profile, allowed_seconds=3 * 13.5)
    probe = Probe(
        deepcopy(model), nn.functional.cross_entropy, profile.graph.groups, [data[0]],
        task.optimizer_fn, np.random.default_rng(0),
    )  # fmt: skip
    scores = IMPORTANCES.make("elastic_same_batch").score(probe)
    # The forward pass and the way to the head take 5 s. From group to group it is 2 s, and the deepest group is out
    # of reach as published; of the three others all subsets, charged with the deepest one's own way on.
    best, best_value = (), 0.0
    for bits in range(1, 8):
        chosen = [g for g in range(3) if bits >> g & 1]
        cost = len(chosen) + 2 * (max(chosen) + 1)
        if cost <= 13.5 - 5 and sum(scores[g] for g in chosen) > best_value:
            best, best_value = tuple(chosen), sum(scores[g] for g in chosen)
    result = PEERS.make("elastictrainer").train(task)
    assert best
    assert {name[0] for name in result.update.deltas} == {profile.group_names[g] for g in best}
    trained = list(result.update.deltas)
    assert_close(weights(task.model), by_hand(model, data, trained, result.steps))


def test_a_peer_trains_in_training_mode() -> None:
    model = conv_net().eval()
    PEERS.make("full_steps").train(task_of(model, images(2)))
    assert model[1].num_batches_tracked == 2 and torch.is_grad_enabled()
