"""A grid that tells how many clients have answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_elastic.flower.interruption import Interrupted

__all__ = ["ReportingGrid"]

_POLL_SECONDS = 0.02


class ReportingGrid(Grid):
    """Wraps a grid; reports each reply as it arrives.

    Parameters
    ----------
    grid : Grid
        Does the work.
    on_reply : callable
        Called with the replies received and expected.
    stop : threading.Event, optional
        Once it is set, waiting for replies ends with `Interrupted`.
    """

    def __init__(
        self,
        grid: Grid,
        on_reply: Callable[[int, int], None],
        stop: threading.Event | None = None,
    ) -> None:
        self._grid = grid
        self._on_reply = on_reply
        self._stop = stop or threading.Event()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push the messages and pull replies until all are there or time is up."""
        waiting = set(self._grid.push_messages(messages))
        expected = len(waiting)
        replies: list[Message] = []
        end = None if timeout is None else time.monotonic() + timeout
        while waiting and (end is None or time.monotonic() < end):
            if self._stop.is_set():
                raise Interrupted
            arrived = list(self._grid.pull_messages(waiting))
            waiting -= {message.metadata.reply_to_message_id for message in arrived}
            for message in arrived:
                replies.append(message)
                self._on_reply(len(replies), expected)
            if not arrived:
                self._stop.wait(_POLL_SECONDS)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Delegate."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Delegate."""
        return self._grid.pull_messages(message_ids)

    def get_node_ids(self) -> Iterable[int]:
        """Delegate."""
        return self._grid.get_node_ids()

    def set_run(self, run) -> None:  # type: ignore[no-untyped-def]
        """Delegate."""
        self._grid.set_run(run)

    @property
    def run(self):  # type: ignore[no-untyped-def]
        """Delegate."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Delegate."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)
