"""What a node runs."""

from functools import partial

import torch
from flwr.app import Context

from fl_elastic import Budget, ElasticClient
from fl_elastic.flower import elastic_client_app

from .task import Net, load_data

SPEEDUPS = (1.0, 1.5, 2.0, 3.0)
"""How many times faster than for the whole model each node's training has to be."""


def client_fn(context: Context) -> ElasticClient:
    """Return the client of one node."""
    partition = int(context.node_config["partition-id"])
    train_loader, test_loader = load_data(partition, int(context.node_config["num-partitions"]))
    rate = float(context.run_config["learning-rate"])
    return ElasticClient(
        Net(),
        train_loader,
        test_loader,
        budget=Budget(speedup=SPEEDUPS[partition % len(SPEEDUPS)]),
        optimizer_fn=partial(torch.optim.SGD, lr=rate, momentum=0.9),
        epochs=int(context.run_config["local-epochs"]),
        state_dir="state",
    )


app = elastic_client_app(client_fn)
