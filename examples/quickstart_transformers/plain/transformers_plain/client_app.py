"""What a node runs."""

from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import get_model, load_data, test, train

app = ClientApp()


def loaders(context: Context) -> Any:
    """Return the loaders of one node."""
    node, config = context.node_config, context.run_config
    return load_data(
        int(node["partition-id"]),
        int(node["num-partitions"]),
        str(config["dataset-name"]),
        str(config["model-name"]),
    )


@app.train()
def train_one(message: Message, context: Context) -> Message:
    """Train the server's model on this node's data."""
    model = get_model(str(context.run_config["model-name"]))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    loader = loaders(context)[0]
    loss = train(model, loader, float(context.run_config["learning-rate"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def test_one(message: Message, context: Context) -> Message:
    """Test the server's model on this node's data."""
    model = get_model(str(context.run_config["model-name"]))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    loader = loaders(context)[1]
    loss, accuracy = test(model, loader)
    examples = len(loader.dataset)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": examples})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
