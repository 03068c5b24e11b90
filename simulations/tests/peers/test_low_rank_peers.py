"""Rivals that train adapters: what each of them merges is what its paper says."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peer_tasks import merged, task_of, weights
from torch import Tensor, nn

from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.update import Manifest, PartialUpdate
from fl_elastic.update.partial import check_update
from fl_elastic_simulations.models.adapters import RANK, low_rank_layers, with_adapters
from fl_elastic_simulations.peers import PEERS, LocalResult
from fl_elastic_simulations.peers.legend import depth_mask
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


def test_flora_folds_the_exact_sum_into_the_layers_and_begins_anew() -> None:
    start = prepared("flora", adapted())
    found, _, models = one_round("flora", start)
    after = deepcopy(start)
    after.load_state_dict(
        {name: torch.as_tensor(each) for name, each in found.items()}, strict=False
    )
    for layer in ("in", "middle"):
        np.testing.assert_allclose(found[f"{layer}.merged"], mean_product(models, layer), atol=1e-6)
        assert not found[f"{layer}.lora_B.weight"].any()
        anew, before = (each[f"{layer}.lora_A.weight"] for each in (found, weights(start)))
        assert np.linalg.matrix_rank(anew) == min(anew.shape) and not np.array_equal(anew, before)
        # What the layer computes now is what the mean of the products would add.
        own = after.get_submodule(layer)
        x = torch.randn(4, own.in_features)  # type: ignore[arg-type]
        added = own(x) - nn.functional.linear(x, own.weight, own.bias)  # type: ignore[arg-type]
        expected = own.scale * x.double().numpy() @ mean_product(models, layer).T  # type: ignore[operator]
        np.testing.assert_allclose(added.detach().numpy(), expected, atol=1e-5)
    again, _, _ = one_round("flora", start)
    assert all(np.array_equal(found[name], again[name]) for name in found)


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


@pytest.mark.parametrize(
    "name", ["fedquad", "flex_lora", "flora", "ffa_lora", "legend", "random_blocks"]
)
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


def test_legend_trains_from_the_output_with_ranks_that_fall_towards_the_input() -> None:
    start = prepared("legend", adapted())
    model = deepcopy(start)
    result = PEERS.make("legend").train(task_of(model, data(0), clients=3, client=0))
    update = result.update
    assert set(update.deltas) == {f"{x}.lora_{y}.weight" for x in ("in", "middle") for y in "AB"}
    # Two blocks: all ranks in the last one, half of them below it.
    for layer, rank in {"in": RANK // 2, "middle": RANK}.items():
        a, b = (update.deltas[f"{layer}.lora_{x}.weight"] for x in "AB")
        assert not a[rank:].any() and not b[:, rank:].any()
        assert a[:rank].any(axis=1).all() and b[:, :rank].any(axis=0).all()
        assert not model.get_parameter(f"{layer}.lora_B.weight")[:, rank:].any()
    assert set(update.parts) == {"in.lora_A.weight", "in.lora_B.weight"}
    check_update(update, Manifest.of(start))


@pytest.mark.parametrize("limit", ["seconds", "memory"])
def test_legends_depth_is_what_time_and_memory_hold(limit: str) -> None:
    start = prepared("legend", adapted())
    task = task_of(deepcopy(start), data(0), clients=3, client=0)
    profile, steps = task.profile, len(data(0))
    last = np.array(["middle" in group.name for group in profile.graph.groups])
    assert last.any() and not last.all()
    enough = (
        {"allowed_seconds": profile.step_seconds(last) * steps}
        if limit == "seconds"
        else {"memory_bytes": mask_bytes(profile, last)}
    )
    update = PEERS.make("legend").train(replace(task, **enough)).update  # type: ignore[arg-type]
    assert set(update.deltas) == {"middle.lora_A.weight", "middle.lora_B.weight"}
    whole = np.ones(len(profile), dtype=bool)
    assert depth_mask(profile, profile.step_seconds(whole), mask_bytes(profile, whole)).all()
    # Somebody with less than that trains one block all the same; its memory is checked by whoever asks it to.
    assert np.array_equal(depth_mask(profile, 1e-9, 0.0), last)
