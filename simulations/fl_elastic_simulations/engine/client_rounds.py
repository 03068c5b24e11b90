"""Rounds of clients that are objects in this process: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fl_elastic.flower.app import elastic_client_app
from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.round import RoundRecord
from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.flower.strategy import PartialUpdates
from fl_elastic.flower.strategy_state import as_record
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid

__all__ = ["client_rounds"]


def client_rounds(
    client_of: Callable[[int], ElasticClient],
    clients: int,
    weights: Mapping[str, NDArray[Any]],
    rounds: int,
    *,
    rule: str = "contributors",
    terms: RoundConfig | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the global model after ``rounds`` rounds, in which all clients take part one after the other.

    Parameters
    ----------
    client_of : callable
        Returns the client with this number, from 0, for one round; it may advance a stream before.
    clients : int
        Number of clients.
    weights : mapping of str to array
        Initial global model.
    rounds : int
        Number of rounds.
    rule : str
        Registered aggregation rule.
    terms : RoundConfig, optional
        Settings of all rounds.
    on_round : callable, optional
        Called with the record of each round.
    """
    app = elastic_client_app(lambda context: client_of(int(context.node_config["partition-id"])))
    strategy = PartialUpdates(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=clients),
        rule=rule, config=terms or RoundConfig(), on_round=on_round,
    )  # fmt: skip
    result = strategy.start(
        grid=InProcessGrid(clients, app), initial_arrays=as_record(weights), num_rounds=rounds
    )
    return {name: array.numpy() for name, array in result.arrays.items()}
