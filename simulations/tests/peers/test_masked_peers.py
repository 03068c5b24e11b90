"""Peers that choose layers: whole rounds of two clients, written out by hand."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from peer_tasks import assert_close, by_hand, merged, task_of, weights
from small_models import chain, vectors

from fl_elastic.errors import BudgetError
from fl_elastic.testing import made_up_profile
from fl_elastic_simulations.peers import PEERS
from fl_elastic_simulations.peers.random_parts import random_mask
from fl_elastic_simulations.peers.timelyfl import deepest_suffix
from fl_elastic_simulations.peers.training import train_mask

EVERY = [f"{layer}.{kind}" for layer in (0, 2, 4, 6) for kind in ("weight", "bias")]
# A step of the chain: 2 s forward; each of its four linear layers and three activations passes the error on for
# 1 s (but the first layer, whose input needs none), the loss three, and each layer takes 1 s for its own gradient.
FULL, HEAD = 15.0, 6.0


def named(*layers: int) -> list[str]:
    return [name for name in EVERY if int(name[0]) in layers]


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


@pytest.mark.parametrize(("allowed", "steps"), [(3.9, 3), (2.2, 2), (1.0, 1)])
def test_a_mask_is_trained_whole_in_every_step_that_fits(allowed: float, steps: int) -> None:
    model, data, mask = chain(), vectors(4), np.array([True, True, False, False])
    task = task_of(model, data)
    seconds = task.profile.step_seconds(mask)
    result = train_mask(replace(task, allowed_seconds=allowed * seconds), "given", mask)
    assert result.update.steps == dict.fromkeys(named(6, 4), steps)
    assert result.host_seconds == pytest.approx(steps * seconds)
    with pytest.raises(BudgetError, match="does not pay for one step"):
        train_mask(replace(task, allowed_seconds=0.9 * seconds), "given", mask)


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
