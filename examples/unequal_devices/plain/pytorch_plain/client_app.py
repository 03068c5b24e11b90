"""What a node runs."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import Net, load_data, train

app = ClientApp()


@app.train()
def train_node(message: Message, context: Context) -> Message:
    """Train the server's model on this node's data."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader = load_data(
        int(context.node_config["partition-id"]),
        int(context.node_config["num-partitions"]),
        int(context.run_config["batch-size"]),
    )
    epochs = int(context.run_config["local-epochs"])
    loss = train(net, loader, epochs, float(message.content["config"]["lr"]))
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(loader.dataset)})
    reply = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)
