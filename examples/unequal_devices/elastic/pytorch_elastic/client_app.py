"""What a node runs."""

from functools import partial

import torch
from flwr.app import Context

from fl_elastic import Budget, ElasticClient
from fl_elastic.flower import elastic_client_app
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic_simulations.unequal import measuring_mod

from .task import Net, load_data


def client_fn(context: Context) -> ElasticClient:
    """Return the client of one node, which plans to the server's deadline."""
    loader = load_data(
        int(context.node_config["partition-id"]),
        int(context.node_config["num-partitions"]),
        int(context.run_config["batch-size"]),
    )
    return ElasticClient(
        Net(),
        loader,
        [],
        budget=Budget(bandwidth=float(context.node_config["bandwidth"])),
        optimizer_fn=partial(
            torch.optim.SGD, lr=float(context.run_config["learning-rate"]), momentum=0.9
        ),
        epochs=int(context.run_config["local-epochs"]),
        # Nodes share the host: its processor time counts, as the layer measures it.
        options=TrainerOptions(timing=Timing(clock="cpu")),
        state_dir="state",
    )


app = elastic_client_app(client_fn, mods=[measuring_mod])
