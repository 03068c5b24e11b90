"""A Flower grid around another one, which does everything that a subclass does not override."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

__all__ = ["GridWrapper"]


class GridWrapper(Grid):
    """Delegates to a grid.

    Parameters
    ----------
    inner : Grid
        The grid that does the work.
    """

    def __init__(self, inner: Grid) -> None:
        self.inner = inner

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Delegate to the inner grid."""
        return self.inner.send_and_receive(messages, timeout=timeout)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Delegate to the inner grid."""
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Delegate to the inner grid."""
        return self.inner.pull_messages(message_ids)

    def get_node_ids(self) -> Iterable[int]:
        """Delegate to the inner grid."""
        return self.inner.get_node_ids()

    def set_run(self, run: Any) -> None:
        """Delegate to the inner grid."""
        self.inner.set_run(run)

    @property
    def run(self) -> Any:
        """Delegate to the inner grid."""
        return self.inner.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Delegate to the inner grid."""
        return self.inner.create_message(content, message_type, dst_node_id, group_id, ttl)
