"""Adapters of unequal depth: each device trains what it can afford, each tensor is merged over who trained it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from adapters import Adapted, adapted, base_of, tokens
from plain_loop import plain_steps
from small_federation import as_weights, quiet, run
from torch import nn

from fl_elastic import Budget
from fl_elastic.flower import (
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    elastic_client_app,
    initial_arrays,
)
from fl_elastic.planning.plain import GivenPolicy
from fl_elastic.profiling import estimate_profile
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.update import Manifest, load_weights, weights_of

LOSS = nn.functional.cross_entropy
RATE = 0.3
# Blocks, counted from the loss, that each client trains, and how many batches it has.
DEPTHS = {1: 4, 2: 2, 3: 1, 4: 3}
BATCHES = {1: 2, 2: 3, 3: 5, 4: 1}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def last_blocks(count: int, *, fixed_a: bool = False) -> list[str]:
    sides = "B" if fixed_a else "BA"
    return [f"blocks.{n}.lora_{side}" for n in range(3, 3 - count, -1) for side in sides]


def federated(
    clients: Mapping[int, ElasticClient], start: Adapted, rounds: int = 1, **options: Any
) -> tuple[dict[str, Any], list[Any]]:
    records: list[Any] = []
    apps = {n: elastic_client_app(lambda _, n=n: clients[n]) for n in clients}
    strategy = PartialUpdates(quiet(), on_round=records.append, **options)
    result, _ = run(strategy, apps, initial_arrays(start), rounds)
    assert all(len(each.accepted) == len(clients) for each in records)
    return as_weights(result.arrays), records


def of_depths(fixed_a: bool) -> dict[int, ElasticClient]:
    return {
        node: ElasticClient(
            adapted(fixed_a=fixed_a), tokens(node, BATCHES[node]), [], budget=Budget(),
            policy=GivenPolicy(last_blocks(depth, fixed_a=fixed_a)), optimizer_fn=sgd,
        )
        for node, depth in DEPTHS.items()
    }  # fmt: skip


def by_hand(node: int, names: list[str], model: Adapted) -> Adapted:
    """What a client's model is after training these groups by a plain loop."""
    model = copy.deepcopy(model)
    trained = {f"{name}.weight" for name in names}
    parameters = [each for name, each in model.named_parameters() if name in trained]
    optimizer = sgd(parameters)
    plain_steps(model, optimizer, tokens(node, BATCHES[node]), LOSS)
    return model


def products(model: Adapted) -> list[torch.Tensor]:
    return [block.delta() for block in model.blocks]  # type: ignore[operator, misc]


def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-7)


def loaded(weights: dict[str, Any], like: Adapted) -> Adapted:
    model = copy.deepcopy(like)
    load_weights(model, Manifest.of(model), weights)
    return model


@pytest.mark.parametrize("fixed_a", [False, True])
def test_every_adapter_is_merged_over_those_who_trained_it(fixed_a: bool) -> None:
    start = adapted(fixed_a=fixed_a)
    clients = of_depths(fixed_a)
    found, records = federated(clients, start)
    names = {node: last_blocks(depth, fixed_a=fixed_a) for node, depth in DEPTHS.items()}
    for each in records[0].accepted:
        assert {name.removesuffix(".weight") for name in each.steps} == set(names[each.node_id])
    ends = {node: by_hand(node, names[node], start).state_dict() for node in DEPTHS}
    for name, before in weights_of(start, Manifest.of(start), Manifest.of(start).names).items():
        group = name.removesuffix(".weight")
        who = [node for node in DEPTHS if group in names[node]]
        weights = np.array([6.0 * BATCHES[node] for node in who])
        moved = [ends[node][name].double().numpy() - before.astype(np.float64) for node in who]
        expected = before + np.tensordot(weights / weights.sum(), np.stack(moved), 1)
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-7, err_msg=name)
    for client in clients.values():
        kept = base_of(client.model)
        assert all(torch.equal(kept[name], each) for name, each in base_of(start).items())


def test_with_a_shared_a_merging_is_exact_in_the_whole_weight() -> None:
    """The mean of B times A is the mean of the products of B and A, over those who trained a block."""
    start, rounds = adapted(fixed_a=True), 2
    for number in range(rounds):
        clients = of_depths(True)
        found, _ = federated(clients, start)
        ends = {n: by_hand(n, last_blocks(d, fixed_a=True), start) for n, d in DEPTHS.items()}
        merged = loaded(found, start)
        for block in range(4):
            who = [node for node, depth in DEPTHS.items() if block >= 4 - depth]
            whole = sum(BATCHES[n] * products(ends[n])[block] for n in who)
            expected = whole / sum(BATCHES[n] for n in who)
            assert alike(products(merged)[block], expected), (number, block)
            assert float(expected.abs().max()) > 1e-3
        start = merged


def test_factors_may_be_merged_by_their_products() -> None:
    """Nearer to the mean of the products than factors that are averaged one by one, through a whole round."""
    start = by_hand(3, last_blocks(4), adapted())

    def clients() -> dict[int, ElasticClient]:
        return {
            node: ElasticClient(
                copy.deepcopy(start), tokens(node, BATCHES[node]), [], budget=Budget(), policy="full",
                optimizer_fn=sgd,
            )
            for node in DEPTHS
        }  # fmt: skip

    ends = {n: by_hand(n, last_blocks(4), start) for n in DEPTHS}
    apart = loaded(federated(clients(), start)[0], start)
    together = loaded(federated(clients(), start, rule="products")[0], start)
    whole = sum(BATCHES.values())
    for block in range(4):
        exact = sum(BATCHES[n] * products(ends[n])[block] for n in DEPTHS) / whole
        assert isinstance(exact, torch.Tensor)
        u, singular, v = torch.linalg.svd(exact)
        nearest = u[:, :2] * singular[:2] @ v[:2]
        assert alike(products(together)[block], nearest)
        errors = [float((products(each)[block] - exact).norm()) for each in (together, apart)]
        assert errors[0] < errors[1]


def test_memory_budgets_give_unequal_depths() -> None:
    """A policy takes the adapters that fit: what a step keeps grows with depth, base and all."""
    profile = estimate_profile(adapted(), LOSS, tokens(1)[0], optimizer_fn=sgd)
    names = list(profile.group_names)
    assert names == last_blocks(4)
    needed = [mask_bytes(profile, np.arange(8) < 2 * depth) for depth in range(1, 5)]
    assert needed == sorted(set(needed))
    clients = {
        node: ElasticClient(
            adapted(), tokens(node, BATCHES[node]), [], policy="last_k", optimizer_fn=sgd,
            budget=Budget(memory=needed[depth - 1] + 1), profile=profile,
        )
        for node, depth in DEPTHS.items()
    }  # fmt: skip
    _, records = federated(clients, adapted())
    deepest = {
        each.node_id: min(int(name.split(".")[1]) for name in each.steps)
        for each in records[0].accepted
    }
    assert deepest == {node: 4 - depth for node, depth in DEPTHS.items()}


def test_below_the_fleets_cut_nothing_is_trained_and_features_are_kept(tmp_path: Any) -> None:
    def client_of(node: int) -> ElasticClient:
        return ElasticClient(
            adapted(), tokens(node, BATCHES[node]), [], budget=Budget(), policy="full",
            optimizer_fn=sgd, state_dir=tmp_path / str(node),
        )  # fmt: skip

    class Fresh(dict[int, ElasticClient]):
        """A process lives for one message."""

        def __getitem__(self, node: int) -> ElasticClient:
            reports.append(client := client_of(node))
            return client

    reports: list[ElasticClient] = []
    found, _ = federated(
        Fresh.fromkeys(DEPTHS), adapted(), 2, config=RoundConfig(cut="fixed:blocks.2")
    )
    start = weights_of(adapted(), Manifest.of(adapted()), Manifest.of(adapted()).names)
    for name, before in start.items():
        assert np.array_equal(found[name], before) == name.startswith(("blocks.0", "blocks.1"))
    later = [each.report for each in reports if each.report is not None][-4:]
    for report in later:
        assert report.forward is not None and report.forward.computed == 0
        assert report.forward.found > 0
