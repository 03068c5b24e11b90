"""Rounds under Flower's secure aggregation, whose workflow is of the legacy kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from in_process_grid import InProcessGrid
from torch import nn

from fl_elastic.flower import ElasticClient, SecurePartialUpdates, elastic_client_app
from fl_elastic.flower._compat import ndarrays_to_parameters, secaggplus_mod
from fl_elastic.update import Manifest, weights_of


class LegacyGrid(InProcessGrid):
    """Legacy proxies want to know the run."""

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)


def begins_with(model: nn.Module, nodes: int) -> FedAvg:
    """A legacy strategy that trains all nodes and lets none evaluate."""
    weights = weights_of(model, Manifest.of(model))
    return FedAvg(
        min_available_clients=nodes, min_fit_clients=nodes, fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters(list(weights.values())),
    )  # fmt: skip


def legacy_app(client: ElasticClient) -> ClientApp:
    """The client's app of Flower's legacy kind."""
    return ClientApp(lambda context: client.to_client(), mods=[secaggplus_mod])


def message_app(client: ElasticClient) -> ClientApp:
    """The client's app on the Message API."""
    return elastic_client_app(lambda context: client, mods=[secaggplus_mod])


def run_securely(
    strategy: SecurePartialUpdates,
    workflow: SecAggPlusWorkflow,
    clients: Mapping[int, ElasticClient],
    rounds: int,
    app: Callable[[ElasticClient], ClientApp] = legacy_app,
) -> tuple[LegacyGrid, list[Message]]:
    """Run the workflow; return the grid with all messages, and the replies."""
    apps = {node: app(made) for node, made in clients.items()}
    replies: list[Message] = []

    def seen(reply: Message) -> Message:
        replies.append(reply)
        return reply

    grid = LegacyGrid(len(apps), apps.__getitem__, seen)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    legacy = LegacyContext(context, ServerConfig(num_rounds=rounds), strategy)
    DefaultWorkflow(fit_workflow=workflow)(grid, legacy)
    return grid, replies
