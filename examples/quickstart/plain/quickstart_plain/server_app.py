"""What the server runs."""

import torch
from flwr.common import Context, Metrics, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from .task import Net


def weighted_average(metrics: list[tuple[int, Metrics]]) -> Metrics:
    """Return the nodes' mean accuracy, weighted by their examples."""
    right = sum(count * float(each["accuracy"]) for count, each in metrics)
    return {"accuracy": right / sum(count for count, _ in metrics)}


def server_fn(context: Context) -> ServerAppComponents:
    """Return the strategy and how many rounds it runs."""
    torch.manual_seed(0)
    weights = [value.numpy() for value in Net().state_dict().values()]
    strategy = FedAvg(
        initial_parameters=ndarrays_to_parameters(weights),
        evaluate_metrics_aggregation_fn=weighted_average,
    )
    rounds = int(context.run_config["num-server-rounds"])
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))


app = ServerApp(server_fn=server_fn)
