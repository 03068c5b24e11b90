"""What a node runs."""

from functools import partial

import torch
from flwr.app import Context

from fl_elastic import Budget, ElasticClient
from fl_elastic.fleet import node_app

from .task import load_data, network


def client_fn(context: Context) -> ElasticClient:
    """Return the client of one node: budget and part of the data are in the node's own settings."""
    settings = context.node_config
    train_loader, test_loader = load_data(
        int(settings["partition-id"]), int(context.run_config["num-nodes"])
    )
    return ElasticClient(
        network(),
        train_loader,
        test_loader,
        budget=Budget(speedup=float(settings.get("speedup", 1))),
        optimizer_fn=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        epochs=3,
    )


app = node_app(client_fn)
