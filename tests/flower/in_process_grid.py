"""A grid that calls a ClientApp directly: Flower's messages and records without its processes.

Every content is written to bytes and read back on its way, so that nothing is shared that would not be in
deployment, and nothing travels that could not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fl_elastic_simulations.engine.in_process_grid import virtual_contexts


class InProcessGrid(Grid):
    """``nodes`` virtual nodes, numbered from 1; ``app_of(node)`` is the ClientApp of each.

    ``alter`` sees every reply before it arrives. ``sent`` keeps the messages as the strategy made them.
    """

    def __init__(
        self,
        nodes: int,
        app_of: Callable[[int], ClientApp],
        alter: Callable[[Message], Message] = lambda message: message,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
        self._app_of = app_of
        self._alter = alter
        self._contexts = virtual_contexts(nodes)
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return list(self.pull_messages(self.push_messages(messages)))

    def _answer(self, message: Message) -> Message:
        arrived = message_from_proto(message_to_proto(message))
        node = message.metadata.dst_node_id
        try:
            reply = self._app_of(node)(arrived, self._contexts[node])
            return message_from_proto(message_to_proto(reply))
        except Exception as error:
            return Message(Error(code=2, reason=repr(error)), reply_to=message)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            self.sent.append(message)
            numbers.append(f"message-{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = numbers[-1]
            reply = self._alter(self._answer(message))
            # What alters a reply may put another in its place.
            reply.metadata.__dict__["_reply_to_message_id"] = numbers[-1]
            self._replies[numbers[-1]] = reply
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(each) for each in message_ids if each in self._replies]

    def set_run(self, run: object) -> None:
        raise AssertionError("not used by strategies")

    @property
    def run(self) -> object:
        raise AssertionError("not used by strategies")

    def create_message(self, *arguments: object, **options: object) -> Message:
        raise AssertionError("not used by strategies")
