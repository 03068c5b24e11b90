"""A grid that calls a ClientApp directly: Flower's messages and records without its processes.

For simulations of many clients on one core: a reply exists only while the strategy merges it, so memory does not
grow with their number, and replies come in the order of the messages, so that a run depends on its seed alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["InProcessGrid", "virtual_contexts"]

_CLIENT_FAILED = 2


class InProcessGrid(Grid):
    """Virtual nodes, numbered from 1, that answer when their reply is asked for.

    Parameters
    ----------
    nodes : int
        How many; node n has partition n - 1.
    app : ClientApp
        Of every node.
    on_reply : callable, optional
        Called with the replies received and expected.
    node_config : callable, optional
        Returns what else the node with this partition is configured with.
    """

    # Replies are handed over one by one as it is.
    streams = True

    def __init__(
        self,
        nodes: int,
        app: ClientApp,
        on_reply: Callable[[int, int], None] = lambda received, expected: None,
        node_config: Callable[[int], dict[str, Any]] = lambda partition: {},
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
        self._app = app
        self._on_reply = on_reply
        self._numbers = itertools.count(1)
        self._waiting: dict[str, Message] = {}
        self._contexts = virtual_contexts(nodes)
        for node, context in self._contexts.items():
            context.node_config.update(node_config(node - 1))

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of all nodes."""
        return list(self._contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the replies one by one, each trained for when it is asked for."""
        del timeout
        sent = list(messages)
        for received, message in enumerate(sent, start=1):
            yield self._answer(message)
            self._on_reply(received, len(sent))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep the messages until their replies are pulled."""
        numbered = {f"message-{next(self._numbers)}": message for message in messages}
        self._waiting |= numbered
        return list(numbered)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer the first of the messages that waits."""
        for identity in message_ids:
            if identity in self._waiting:
                reply = self._answer(self._waiting.pop(identity), identity)
                return [reply]
        return []

    def _answer(self, message: Message, identity: str | None = None) -> Message:
        message.metadata.__dict__["_message_id"] = identity or f"message-{next(self._numbers)}"
        try:
            return self._app(message, self._contexts[message.metadata.dst_node_id])
        # Whatever a client raises is its own failure, as it is in deployment.
        except Exception as error:
            return Message(Error(code=_CLIENT_FAILED, reason=repr(error)), reply_to=message)

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """Raise: there is no run on a server."""
        raise NotImplementedError("a grid in this process has no run on a server")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)


def virtual_contexts(nodes: int) -> dict[int, Context]:
    """Return the context of each node by its number; node n has partition n - 1."""
    return {
        node: Context(
            run_id=1,
            node_id=node,
            node_config={"partition-id": node - 1, "num-partitions": nodes},
            state=RecordDict(),
            run_config={},
        )
        for node in range(1, nodes + 1)
    }
