"""A grid that tells how many clients have answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from fl_elastic.flower.streaming_grid import StreamingGrid

__all__ = ["ReportingGrid"]


class ReportingGrid(StreamingGrid):
    """Wraps a grid; reports each reply as it arrives, and returns all of them together.

    Together they can be put in an order that does not depend on who was faster, so that a simulation depends on
    its seed alone.

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
        super().__init__(grid, on_reply=on_reply, stop=stop)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push the messages and pull replies until all are there or time is up."""
        return list(super().send_and_receive(messages, timeout=timeout))
