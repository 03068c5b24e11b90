"""With every tensor from every client, merging partial updates is Flower's own FedAvg."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from small_federation import (
    EXAMPLES,
    DenseLists,
    arrays_of,
    as_weights,
    assert_close,
    build,
    elastic_client,
    legacy_app,
    quiet,
    run,
)
from torch import nn

from fl_elastic.flower import PartialUpdates, RoundRecord


def apps(norm: str) -> dict[int, ClientApp]:
    return {
        node: legacy_app(lambda node=node: elastic_client(build(norm), node))
        for node in range(1, len(EXAMPLES) + 1)
    }


def trained(strategy: Strategy, norm: str, rounds: int) -> ArrayRecord:
    return run(strategy, apps(norm), arrays_of(build(norm)), rounds)[0].arrays


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize("rule", ["contributors", "all"])
def test_full_updates_give_the_arrays_of_flowers_fedavg(norm: str, rounds: int, rule: str) -> None:
    packed = trained(PartialUpdates(quiet(FedAvg), rule=rule), norm, rounds)
    dense = trained(DenseLists(quiet(FedAvg)), norm, rounds)
    assert_close(packed, dense)
    first = as_weights(arrays_of(build(norm)))
    moved = max(abs(array - first[name]).max() for name, array in as_weights(dense).items())
    assert moved > 0.01


@pytest.mark.parametrize("clients", [2, 4])
def test_changes_far_larger_than_the_model_are_those_of_fedavg_from_the_first_round_on(
    clients: int,
) -> None:
    """Weights that begin next to nothing, as those of zero initialisation do."""

    def small() -> nn.Module:
        model = build("none")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1e-3)
        return model

    def found(strategy: Strategy) -> ArrayRecord:
        nodes = {
            n: legacy_app(lambda n=n: elastic_client(small(), n)) for n in range(1, clients + 1)
        }
        return run(strategy, nodes, arrays_of(small()), 1)[0].arrays

    records: list[RoundRecord] = []
    packed = found(PartialUpdates(quiet(FedAvg, clients), on_round=records.append))
    assert_close(packed, found(DenseLists(quiet(FedAvg, clients))))
    first = as_weights(arrays_of(small()))
    assert (
        max(
            abs(each - first[name]).max() / abs(first[name]).max()
            for name, each in as_weights(packed).items()
        )
        > 4
    )
    assert not records[0].shortened


def test_clients_weigh_as_many_examples_as_they_have() -> None:
    """A client with four times the examples pulls four times as hard."""
    norm, first = "none", as_weights(arrays_of(build("none")))
    alone = {
        node: as_weights(
            run(
                PartialUpdates(quiet(nodes=1, min_train_nodes=1)),
                {1: legacy_app(lambda node=node: elastic_client(build(norm), node))},
                arrays_of(build(norm)),
            )[0].arrays
        )
        for node in (1, 4)
    }
    both = {
        1: legacy_app(lambda: elastic_client(build(norm), 1)),
        2: legacy_app(lambda: elastic_client(build(norm), 4)),
    }
    merged = run(PartialUpdates(quiet(nodes=2)), both, arrays_of(build(norm)))[0].arrays
    expected = {
        name: ((6 * alone[1][name] + 24 * alone[4][name]) / 30).astype(array.dtype)
        for name, array in first.items()
    }
    assert_close(merged, expected)
