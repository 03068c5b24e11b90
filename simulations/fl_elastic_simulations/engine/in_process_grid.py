"""A grid that calls a ClientApp directly: Flower's messages and records without its processes.

It is meant for simulations of many clients. A reply exists only while the strategy merges it, so memory does not
grow with the number of clients. Replies come in the order of the messages, so that a run depends only on its seed.
Clients train in this process, or several at a time in other processes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.engine.worker_processes import worker_processes

_CLIENT_FAILED = 2
# Replies per process that may wait for earlier ones: more would only take memory.
_AHEAD = 2


class InProcessGrid(Grid):
    """Virtual nodes, numbered from 1, that compute a reply when it is requested.

    Parameters
    ----------
    nodes : int
        Number of nodes; node n has partition n - 1.
    app : ClientApp
        The app of every node.
    on_reply : callable, optional
        Called with the numbers of replies received and expected.
    node_config : callable, optional
        Returns further node configuration for a partition.
    processes : ClientProcesses, optional
        Processes in which clients answer, instead of ``app`` in this process; see `client_processes`.
    """

    # The strategy's wrapper need not split the replies: they are yielded one by one.
    streams = True

    def __init__(
        self,
        nodes: int,
        app: ClientApp,
        on_reply: Callable[[int, int], None] = lambda received, expected: None,
        node_config: Callable[[int], dict[str, Any]] = lambda partition: {},
        processes: ClientProcesses | None = None,
    ) -> None:
        _be_the_server()
        self._app = app
        self._processes = processes
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
        """Yield the replies one by one; each is computed when it is requested, or ahead of time by a process."""
        del timeout
        sent = list(messages)
        processes = self._processes
        replies = (
            map(self._answer, sent)
            if processes is None
            else processes.answered(self._named(each) for each in sent)
        )
        for received, reply in enumerate(replies, start=1):
            yield reply
            self._on_reply(received, len(sent))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep the messages until their replies are pulled."""
        numbered = {f"message-{next(self._numbers)}": message for message in messages}
        self._waiting |= numbered
        return list(numbered)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the reply to the first message that waits; none if no message waits."""
        for identity in message_ids:
            if identity in self._waiting:
                reply = self._answer(self._waiting.pop(identity), identity)
                return [reply]
        return []

    def _answer(self, message: Message, identity: str | None = None) -> Message:
        named = self._named(message, identity)
        if self._processes is None:
            return _answered_by(self._app, *named)
        return next(self._processes.answered([named]))

    def _named(self, message: Message, identity: str | None = None) -> tuple[Message, Context]:
        """Give a message an id, and return it with the context of its node."""
        message.metadata.__dict__["_message_id"] = identity or f"message-{next(self._numbers)}"
        return message, self._contexts[message.metadata.dst_node_id]

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


class ClientProcesses:
    """Answers messages with apps in other processes; see `client_processes`.

    Parameters
    ----------
    pool : ProcessPoolExecutor
        Pool of processes, each of which has made its app.
    workers : int
        Number of processes.
    """

    def __init__(self, pool: ProcessPoolExecutor, workers: int) -> None:
        self._pool, self._most = pool, _AHEAD * workers

    def answered(self, messages: Iterable[tuple[Message, Context]]) -> Iterator[Message]:
        """Yield the replies in the order of the messages, and update the state of each node.

        Raises
        ------
        ScenarioError
            If one of the processes has ended.
        """
        waiting: deque[tuple[Future[tuple[Message, RecordDict]], Context]] = deque()
        try:
            for message, context in messages:
                waiting.append((self._pool.submit(_answered_here, message, context), context))
                if len(waiting) >= self._most:
                    yield _reply_of(*waiting.popleft())
            while waiting:
                yield _reply_of(*waiting.popleft())
        except BrokenProcessPool:
            raise ScenarioError(
                "a process in which clients train has ended: it was killed, perhaps for want of memory; use fewer "
                "workers"
            ) from None


@contextmanager
def client_processes(
    make_app: Callable[[], ClientApp], workers: int
) -> Iterator[ClientProcesses | None]:
    """Yield an object that answers messages in ``workers`` processes; None for one, which is this process.

    Parameters
    ----------
    make_app : callable
        Makes the app; importable, called once in each process. Any state of the app must be in its context or on
        disk.
    workers : int
        Number of processes, each with one message at a time.
    """
    if workers == 1:
        yield None
        return
    with worker_processes(workers, _make, make_app) as pool:
        yield ClientProcesses(pool, workers)


_APP: list[ClientApp] = []


def _make(make_app: Callable[[], ClientApp]) -> None:
    _be_the_server()
    _APP.append(make_app())


def _be_the_server() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1


def _answered_here(message: Message, context: Context) -> tuple[Message, RecordDict]:
    return _answered_by(_APP[0], message, context), context.state


def _reply_of(future: Future[tuple[Message, RecordDict]], context: Context) -> Message:
    reply, context.state = future.result()
    return reply


def _answered_by(app: ClientApp, message: Message, context: Context) -> Message:
    try:
        return app(message, context)
    # Any error of a client is its own failure, as in deployment.
    except Exception as error:
        return Message(Error(code=_CLIENT_FAILED, reason=repr(error)), reply_to=message)
