"""What a node runs."""

from functools import partial

import torch
from flwr.app import Context

from fl_elastic import Budget, ElasticClient
from fl_elastic.flower import elastic_client_app

from .task import get_model, load_data

SPEEDUPS = (1.0, 1.5, 2.0, 3.0)
"""How many times faster than for the whole model each node's training has to be."""


def client_fn(context: Context) -> ElasticClient:
    """Return the client of one node."""
    node, config = context.node_config, context.run_config
    partition = int(node["partition-id"])
    train_loader, test_loader = load_data(
        partition,
        int(node["num-partitions"]),
        str(config["dataset-name"]),
        str(config["model-name"]),
    )
    return ElasticClient(
        get_model(str(config["model-name"])),
        train_loader,
        test_loader,
        budget=Budget(speedup=SPEEDUPS[partition % len(SPEEDUPS)]),
        optimizer_fn=partial(torch.optim.AdamW, lr=float(config["learning-rate"])),
        state_dir="state",
    )


app = elastic_client_app(client_fn)
