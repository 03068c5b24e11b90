"""Rounds of a plain app on Flower's own engine, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fl_elastic.errors import ScenarioError
from fl_elastic.flower.incremental_grid import IncrementalGrid


def plain_rounds(
    train: Callable[[Mapping[str, Tensor], int], nn.Module],
    weights: Mapping[str, Tensor],
    *,
    clients: int,
    each_round: int,
    rounds: int,
    on_reply: Callable[[int, int], None],
) -> None:
    """Run Flower's FedAvg with clients that only train.

    Parameters
    ----------
    train : callable
        ``train(weights, client)`` returns the model after a client's steps; importable.
    weights : mapping of str to tensor
        Initial weights.
    clients, each_round, rounds : int
        Number of clients, of participants per round, and of rounds.
    on_reply : callable
        Called with the numbers of replies received and expected.

    Raises
    ------
    ScenarioError
        If no client of a round could train.
    """
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=each_round / clients, fraction_evaluate=0.0,
            min_train_nodes=1, min_available_nodes=clients,
        )  # fmt: skip
        watched = IncrementalGrid(grid, on_reply=on_reply)
        record = ArrayRecord(dict(weights))
        result = strategy.start(grid=watched, initial_arrays=record, num_rounds=rounds)
        if not all(result.train_metrics_clientapp.values()):
            raise ScenarioError("clients of Flower's engine failed: see what it logs")

    run_simulation(server, _app(train), num_supernodes=clients)


def _app(train: Callable[[Mapping[str, Tensor], int], nn.Module]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        arrays = message.content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        client = int(context.node_config["partition-id"])
        model = train(arrays.to_torch_state_dict(), client)
        content = RecordDict({
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 1, "trained": 1}),
        })  # fmt: skip
        return Message(content, reply_to=message)

    return app
