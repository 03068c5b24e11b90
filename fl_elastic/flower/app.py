"""Apps on Flower's Message API over the same core as the ``NumPyClient``."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.wire import evaluate_reply, read_instruction, train_reply
from fl_elastic.training.lean_start import without_compiler

__all__ = ["elastic_client_app"]


def elastic_client_app(client_fn: Callable[[Context], ElasticClient]) -> ClientApp:
    """Return a ClientApp with train, evaluate and query functions.

    Where a process lives for one message, torch's compiler is not loaded unless the model asks for it.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context)`` returns the `ElasticClient` of this node.

    Examples
    --------
    >>> def client_fn(context):
    ...     return ElasticClient(model, train, test, budget=Budget(speedup=2), state_dir="state")
    >>> app = elastic_client_app(client_fn)
    """
    app = ClientApp()
    without_compiler()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays, config = read_instruction("train", message.content)
        reply = client_fn(context).fit(arrays, config)
        return Message(train_reply(*reply), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        arrays, config = read_instruction("evaluate", message.content)
        reply = client_fn(context).evaluate(arrays, config)
        return Message(evaluate_reply(*reply), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        properties = client_fn(context).get_properties({})
        return Message(RecordDict({"properties": ConfigRecord(properties)}), reply_to=message)

    return app
