"""What a node runs."""

from typing import Any

import torch
from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import Context
from numpy.typing import NDArray
from torch import nn

from .task import Loader, Net, load_data, test, train

Arrays = list[NDArray[Any]]


class FlowerClient(NumPyClient):
    """Trains the whole model and sends all of it."""

    def __init__(
        self, net: nn.Module, train_loader: Loader, test_loader: Loader, epochs: int, rate: float
    ) -> None:
        self.net = net
        self.train_loader = train_loader
        self.test_loader = test_loader
        self.epochs = epochs
        self.rate = rate

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        """Train the server's model on this node's data."""
        self.set_weights(parameters)
        loss = train(self.net, self.train_loader, self.epochs, self.rate)
        weights = [value.numpy() for value in self.net.state_dict().values()]
        examples = len(self.train_loader.dataset)  # type: ignore[arg-type]
        return weights, examples, {"train-loss": loss}

    def evaluate(
        self, parameters: Arrays, config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Test the server's model on this node's data."""
        self.set_weights(parameters)
        loss, accuracy = test(self.net, self.test_loader)
        examples = len(self.test_loader.dataset)  # type: ignore[arg-type]
        return loss, examples, {"accuracy": accuracy}

    def set_weights(self, parameters: Arrays) -> None:
        """Take over the server's weights."""
        names = self.net.state_dict().keys()
        tensors = {name: torch.tensor(array) for name, array in zip(names, parameters, strict=True)}
        self.net.load_state_dict(tensors)


def client_fn(context: Context) -> Client:
    """Return the client of one node."""
    partition = int(context.node_config["partition-id"])
    train_loader, test_loader = load_data(partition, int(context.node_config["num-partitions"]))
    epochs = int(context.run_config["local-epochs"])
    rate = float(context.run_config["learning-rate"])
    return FlowerClient(Net(), train_loader, test_loader, epochs, rate).to_client()


app = ClientApp(client_fn)
