"""A grid that calls a ClientApp directly: Flower's messages and records without its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class InProcessGrid(Grid):
    """``nodes`` virtual nodes; ``app_of(node)`` is the ClientApp of each."""

    def __init__(
        self,
        nodes: int,
        app_of: Callable[[int], ClientApp],
        alter: Callable[[Message], Message] = lambda message: message,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
        self._app_of = app_of
        self._alter = alter
        self._contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": nodes},
                state=RecordDict(),
                run_config={},
            )
            for node in range(1, nodes + 1)
        }
        self.sent: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        for index, message in enumerate(messages):
            self.sent.append(message)
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"message-{index}"
            try:
                reply = self._app_of(node)(message, self._contexts[node])
            except Exception as error:
                reply = Message(Error(code=2, reason=repr(error)), reply_to=message)
            replies.append(self._alter(reply))
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise AssertionError("not used by strategies")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise AssertionError("not used by strategies")

    def set_run(self, run: object) -> None:
        raise AssertionError("not used by strategies")

    @property
    def run(self) -> object:
        raise AssertionError("not used by strategies")

    def create_message(self, *arguments: object, **options: object) -> Message:
        raise AssertionError("not used by strategies")
