"""A grid that yields each reply as it arrives, so that it can be merged and dropped at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_elastic.flower.client_availability import ClientAvailability

_LOG = logging.getLogger("fl_elastic")
FORGET_AFTER = 5
"""Number of rounds after which the grid no longer polls for a late reply."""
# Node id under which Flower's SuperLink answers in place of nodes.
_SUPERLINK = 1
# Seconds between two polls for replies: the first and the longest interval, and the growth factor.
_SHORTEST_WAIT, _LONGEST_WAIT, _BACK_OFF = 0.02, 0.5, 1.5


class Interrupted(Exception):
    """The user stopped the run.

    Not a KeyboardInterrupt, because Flower reports only ordinary exceptions of its server thread.
    """


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

    def get_nodes(self) -> Iterable[Any]:
        """Return the inner grid's information on the nodes of `get_node_ids`."""
        known = {get_node.node_id: get_node for get_node in self.inner.get_nodes()}
        return [known[node] for node in self.get_node_ids() if node in known]

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


@dataclass
class _Sent:
    """A message without a reply: its node, when it was sent, and for how many more rounds to poll for the reply."""

    node: int
    since: float
    training: bool = True
    rounds: int = 0


class IncrementalGrid(GridWrapper):
    """Wraps a grid; yields replies one by one instead of collecting all replies of a round.

    Parameters
    ----------
    grid : Grid
        The grid that does the work.
    patience : callable, optional
        Returns how many seconds to wait for replies to training messages; None to wait for all. Called when the
        messages have been sent.
    late : bool
        Whether a late reply is still yielded, with the replies of a later round of training.
    on_reply : callable, optional
        Called with the numbers of replies received and expected.
    stop : threading.Event, optional
        When it is set, waiting for replies ends with `Interrupted`.
    listener : ClientAvailability, optional
        Records which node answered after how many seconds, and decides for which nodes a round waits. Without it a
        round waits for all.
    """

    streams = True

    def __init__(
        self,
        grid: Grid,
        *,
        patience: Callable[[], float | None] = lambda: None,
        late: bool = False,
        on_reply: Callable[[int, int], None] = lambda received, expected: None,
        stop: threading.Event | None = None,
        listener: ClientAvailability | None = None,
    ) -> None:
        super().__init__(grid)
        self._listener = listener
        self._patience = patience
        self._late = late
        self._on_reply = on_reply
        self._stop = stop or threading.Event()
        self._end: float | None = None
        # Messages of earlier rounds without a reply.
        self._outstanding: dict[str, _Sent] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push the messages; return an iterator over replies that ends when all have arrived or time is up."""
        sent = list(messages)
        training = any(message.metadata.message_type == "train" for message in sent)
        pushed = list(self.inner.push_messages(sent))
        now = time.monotonic()
        # Flower returns None for a message that could not be stored.
        waiting = {
            identity: _Sent(message.metadata.dst_node_id, now, training)
            for identity, message in zip(pushed, sent, strict=False)
            if identity
        }
        limits = [timeout, self._patience() if training else None]
        if self._listener is not None:
            limits.append(self._listener.patience([each.node for each in waiting.values()]))
        seconds = min((limit for limit in limits if limit is not None), default=None)
        end = None if seconds is None else now + seconds
        if training:
            self._end = end
        return self._arriving(waiting, end, training)

    def seconds_left(self) -> float | None:
        """Return the seconds left for the last training; None if it has no limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def _arriving(
        self, waiting: dict[str, _Sent], end: float | None, training: bool
    ) -> Iterator[Message]:
        expected, received, wait = len(waiting), 0, _SHORTEST_WAIT
        awaited = self._awaited(waiting)
        over = False
        try:
            # Poll once more when time is up: replies that arrived while others were merged were in time.
            while awaited and not over:
                if self._stop.is_set():
                    raise Interrupted
                over = end is not None and time.monotonic() >= end
                # In the order of sending; messages of earlier rounds last.
                late = list(self._outstanding) if training else []
                arrived = []
                for message in self.inner.pull_messages([*waiting, *late]):
                    answered = message.metadata.reply_to_message_id
                    old = self._outstanding.pop(answered, None)
                    sent = waiting.pop(answered, old)
                    if sent is not None:
                        self._hear(message, sent)
                    awaited.discard(answered)
                    if old is None:
                        received += 1
                        self._on_reply(received, expected)
                    if old is None or self._late:
                        arrived.append(message)
                wait = _SHORTEST_WAIT if arrived else min(wait * _BACK_OFF, _LONGEST_WAIT)
                idle = not arrived
                while arrived:
                    yield arrived.pop(0)
                if idle and not over:
                    left = wait if end is None else min(wait, end - time.monotonic())
                    self._stop.wait(max(left, 0.0))
        finally:
            if self._listener is not None:
                for sent in waiting.values():
                    self._listener.missed(sent.node)
            if training and (self._late or self._listener is not None):
                self._remember(waiting)

    def _awaited(self, waiting: Mapping[str, _Sent]) -> set[str]:
        """Return the messages whose replies end a round; all of them if the listener awaits none."""
        listener = self._listener
        if listener is None:
            return set(waiting)
        found = {each for each, sent in waiting.items() if listener.awaits(sent.node)}
        return found or set(waiting)

    def _hear(self, message: Message, sent: _Sent) -> None:
        """Report an answer to the listener; an error that the SuperLink reports is not an answer of the node."""
        if message.has_error() and message.metadata.src_node_id == _SUPERLINK:
            message.metadata.__dict__["_src_node_id"] = sent.node
        elif self._listener is not None:
            took = time.monotonic() - sent.since
            self._listener.heard(sent.node, took if sent.training else None)

    def _remember(self, missing: Mapping[str, _Sent]) -> None:
        """Keep missing replies for later rounds, and drop those that have been missing for too many rounds."""
        for identity, sent in list(self._outstanding.items()):
            sent.rounds -= 1
            if sent.rounds < 1:
                del self._outstanding[identity]
        for identity, sent in missing.items():
            sent.rounds = FORGET_AFTER
            self._outstanding[identity] = sent


@contextmanager
def incremental(grid: Grid, strategy: object) -> Iterator[Grid]:
    """Yield a grid that streams replies to ``strategy`` for as long as the strategy waits.

    The grid itself is yielded if it already streams, or if the strategy may need all replies at once. Under a
    wrapper strategy of Flower's the patience is that of the wrapped strategy. A streaming grid that measures time
    itself has an attribute ``patience``: inside the block this is the strategy's patience; afterwards the grid's
    own is restored, because another strategy may use the grid next. Such a grid drops late updates, which is
    logged.
    """
    inside: Any = strategy
    while inside is not None and not hasattr(inside, "merges_late"):
        inside = getattr(inside, "strategy", None)
    streams = getattr(grid, "streams", False)
    if inside is None or (streams and not hasattr(grid, "patience")):
        yield grid
    elif not streams:
        yield IncrementalGrid(
            grid,
            patience=inside.patience,
            late=inside.merges_late,
            listener=getattr(inside, "availability", None),
        )
    else:
        if inside.merges_late:
            _LOG.warning(
                "late='merge' has no effect on %s, which drops late replies", type(grid).__name__
            )
        timed = cast(Any, grid)
        own, timed.patience = timed.patience, inside.patience
        try:
            yield grid
        finally:
            timed.patience = own


def collecting(grid: Grid) -> Grid:
    """Return a grid that waits for all replies and does not record times: the inner one of an `IncrementalGrid`."""
    return grid.inner if isinstance(grid, IncrementalGrid) else grid


def warned_of_a_wrapper(grid: Grid) -> bool:
    """Warn if a wrapper strategy passes a grid that waits for all replies; return whether it does."""
    if getattr(grid, "streams", False):
        return False
    _LOG.warning(
        "another strategy is wrapped around PartialUpdates and waits for all replies: the deadline ends no "
        "round, and late updates are lost; put PartialUpdates outside, as in PartialUpdates(Wrapper(FedAvg()))"
    )
    return True
