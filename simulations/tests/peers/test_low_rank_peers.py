"""Rivals that train adapters: what each of them merges is what its paper says."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peer_tasks import merged, task_of, weights
from torch import Tensor, nn

from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.partial import check_update
from fl_elastic_simulations.models.adapters import RANK, low_rank_layers, with_adapters
from fl_elastic_simulations.peers import PEERS, LocalResult
from fl_elastic_simulations.peers.low_rank import affordable_rank

_WIDTH = 12
_FRACTIONS = (1.0, 1 / 4, 1 / 16)
_Array = NDArray[np.float64]


def adapted(started: bool = True) -> nn.Module:
    """Three linear layers, of which two have adapters; ``started`` ones have been trained before."""
    torch.manual_seed(1)
    layers = [
        ("in", nn.Linear(6, _WIDTH)),
        ("middle", nn.Linear(_WIDTH, _WIDTH)),
        ("out", nn.Linear(_WIDTH, 3)),
    ]
    model = with_adapters(nn.Sequential(OrderedDict(layers)), ("in", "middle"))
    for layer in low_rank_layers(model).values() if started else ():
        nn.init.normal_(layer.lora_B.weight, std=0.3)
    return model


def data(client: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(client)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(2 + client)
    ]


def trained(
    name: str, start: nn.Module, client: int, fraction: float
) -> tuple[LocalResult, nn.Module]:
    model = deepcopy(start)
    task = task_of(model, data(client), clients=3, client=client, fraction=fraction)
    return PEERS.make(name).train(task), model


def prepared(name: str, model: nn.Module) -> nn.Module:
    return PEERS.make(name).prepare(model, nn.functional.cross_entropy, data(0)[0])


def product(values: dict[str, Any], layer: str) -> _Array:
    b, a = (np.asarray(values[f"{layer}.lora_{x}.weight"], np.float64) for x in "BA")
    return np.asarray(b @ a)


def mean_product(models: list[nn.Module], layer: str) -> _Array:
    shares = np.array([8.0 * len(data(client)) for client in range(len(models))])
    each = [product(weights(model), layer) for model in models]
    return np.asarray(np.tensordot(shares / shares.sum(), np.stack(each), 1))


def one_round(
    name: str, start: nn.Module
) -> tuple[dict[str, Any], list[LocalResult], list[nn.Module]]:
    ends = [trained(name, start, client, each) for client, each in enumerate(_FRACTIONS)]
    for result, _ in ends:
        check_update(result.update, Manifest.of(start))
    results = [result for result, _ in ends]
    return merged(PEERS.make(name), start, results), results, [model for _, model in ends]


def test_flexlora_gives_everybody_the_nearest_to_the_mean_of_products() -> None:
    start = prepared("flex_lora", adapted())
    found, results, models = one_round("flex_lora", start)
    for layer in ("in", "middle"):
        # Each client's own model ends behind its rank.
        ranks = [np.linalg.matrix_rank(product(weights(model), layer)) for model in models]
        assert ranks == [
            min(affordable_rank(RANK, each), 6 if layer == "in" else RANK) for each in _FRACTIONS
        ]
        u, singular, v = np.linalg.svd(mean_product(models, layer))
        most = min(RANK, len(singular))
        nearest = u[:, :most] * singular[:most] @ v[:most]
        np.testing.assert_allclose(product(found, layer), nearest, atol=1e-6)
    sent = [sum(int(np.count_nonzero(each)) for each in r.update.deltas.values()) for r in results]
    assert sent[0] > sent[1] > sent[2] > 0


def test_ffa_lora_leaves_a_alone_and_its_mean_is_exact() -> None:
    start = prepared("ffa_lora", adapted())
    assert not any("lora_A" in name for name in Manifest.of(start).names)
    found, results, models = one_round("ffa_lora", start)
    whole = {**{name: each.detach().numpy() for name, each in start.named_parameters()}, **found}
    for layer in ("in", "middle"):
        b = [np.asarray(weights(model)[f"{layer}.lora_B.weight"]) for model in models]
        a = start.get_parameter(f"{layer}.lora_A.weight").detach().double().numpy()
        shares = np.array([2.0, 3.0, 4.0]) / 9
        exact = np.tensordot(shares, np.stack([each @ a for each in b]), 1)
        np.testing.assert_allclose(product(whole, layer), exact, atol=1e-6)
    assert all(
        set(r.update.deltas) == {"in.lora_B.weight", "middle.lora_B.weight"} for r in results
    )


@pytest.mark.parametrize("name", ["flex_lora", "ffa_lora", "random_blocks"])
def test_the_base_and_what_has_no_adapter_stay(name: str) -> None:
    start = prepared(name, adapted(started=False))
    result, model = trained(name, start, 1, 1 / 4)
    assert any(np.any(delta) for delta in result.update.deltas.values())
    assert all("lora_" in each for each in result.update.deltas)
    for each, before in start.named_parameters():
        if "lora_" not in each:
            assert torch.equal(model.get_parameter(each), before), each


def test_ranks_beyond_a_clients_own_do_not_move() -> None:
    start = prepared("flex_lora", adapted())
    result, _ = trained("flex_lora", start, 0, 1 / 16)
    update: PartialUpdate = result.update
    rank = affordable_rank(RANK, 1 / 16)
    for layer in ("in", "middle"):
        assert not update.deltas[f"{layer}.lora_A.weight"][rank:].any()
        assert not update.deltas[f"{layer}.lora_B.weight"][:, rank:].any()
        rows, whole = update.parts[f"{layer}.lora_A.weight"]
        assert whole is None and rows is not None and rows.sum() == rank
