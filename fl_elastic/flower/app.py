"""A ClientApp on Flower's Message API, with the same core as the ``NumPyClient``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray

from fl_elastic.flower.client import ElasticClient
from fl_elastic.flower.records import as_asked, evaluate_reply, read_instruction, train_reply
from fl_elastic.flower.shown_log import show_log
from fl_elastic.training.lean_start import without_compiler

Config: TypeAlias = dict[str, Any]


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

    def answer(
        kind: str, arrays: list[NDArray[Any]], config: Config, context: Context
    ) -> RecordDict:
        show_log()
        client = client_fn(context)
        client.run_on(context)
        # Without a state folder importance is kept in the state of Flower's context, which lasts for a run.
        client.state.recall_from(context.state)
        if kind == "evaluate":
            return evaluate_reply(*client.evaluate(arrays, config))
        reply = client.fit(arrays, config)
        client.state.keep_in(context.state)
        return train_reply(*reply)

    return answering_app(answer, mods)


def answering_app(
    answer: Callable[[str, list[NDArray[Any]], Config, Context], RecordDict],
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Return a ClientApp that answers messages by ``answer(kind, arrays, config, context)``."""
    app = ClientApp(mods=list(mods))

    def answered(kind: str, message: Message, context: Context) -> Message:
        # For each message: Flower may run the app in a process that did not make it.
        without_compiler()
        reply = answer(kind, *read_instruction(kind, message.content), context)
        return Message(as_asked(message.content, reply), reply_to=message)

    app.train()(partial(answered, "train"))
    app.evaluate()(partial(answered, "evaluate"))
    return app
