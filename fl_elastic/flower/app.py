"""A ClientApp on Flower's Message API, with the same core as the ``NumPyClient``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.records import as_asked, evaluate_reply, read_instruction, train_reply
from fl_elastic.flower.shown_log import show_log
from fl_elastic.training.lean_start import without_compiler


def elastic_client_app(
    client_fn: Callable[[Context], ElasticClient], mods: Sequence[Mod] = ()
) -> ClientApp:
    """Return a ClientApp that does the server's tasks (`fl_elastic.flower.tasks`).

    Torch's compiler is loaded only if the model asks for it, because loading it would take much of the time of a
    process that lives for one message.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context)`` returns the `ElasticClient` of this node.
    mods : sequence of callable
        Flower's mods, as ClientApp takes them; the first is the outermost.

    Examples
    --------
    >>> def client_fn(context):
    ...     return ElasticClient(model, train, test, budget=Budget(speedup=2), state_dir="state")
    >>> app = elastic_client_app(client_fn)
    """
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays, config = read_instruction("train", message.content)
        client = _client_of(client_fn, context)
        reply = client.fit(arrays, config)
        client.state.keep_in(context.state)
        return Message(as_asked(message.content, train_reply(*reply)), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        arrays, config = read_instruction("evaluate", message.content)
        reply = _client_of(client_fn, context).evaluate(arrays, config)
        return Message(as_asked(message.content, evaluate_reply(*reply)), reply_to=message)

    return app


def _client_of(client_fn: Callable[[Context], ElasticClient], context: Context) -> ElasticClient:
    """Return the client of this node, with the node's id and the importance kept from its earlier messages.

    Without a state folder the importance is kept in the state of Flower's context, which lasts for a run.
    """
    # For each message: Flower may run the app in a process that did not make it.
    without_compiler()
    show_log()
    client = client_fn(context)
    client.run_on(context)
    client.state.recall_from(context.state)
    return client
