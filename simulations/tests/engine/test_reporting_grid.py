"""Waiting for replies: counted as they come, given up in time, and stopped by Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fl_elastic.flower.incremental_grid import Interrupted
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.interrupts import stopped_by_interrupt
from fl_elastic_simulations.engine.simulate import ReportingGrid
from fl_elastic_simulations.unequal import measuring_mod


def message(number: int) -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    made = Message(RecordDict(), dst_node_id=number, message_type="train")
    made.metadata.__dict__["_message_id"] = f"message-{number}"
    return made


class Slow(Grid):
    """Answers one message more at every second look, up to ``answers``."""

    def __init__(self, answers: int) -> None:
        self._left = answers
        self._looks = 0
        self._sent: dict[str, Message] = {}
        self.created: list[int] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._sent = {each.metadata.message_id: each for each in messages}
        return list(self._sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._looks += 1
        if self._looks % 2 or not self._left:
            return []
        self._left -= 1
        return [Message(RecordDict(), reply_to=self._sent[min(message_ids)])]

    def get_node_ids(self) -> Iterable[int]:
        return [1, 2, 3]

    def set_run(self, run: object) -> None:
        self.created.append(-1)

    @property
    def run(self) -> str:
        return "the run"

    def create_message(self, content: RecordDict, kind: str, node: int, *rest: object) -> Message:
        self.created.append(node)
        return message(node)

    def send_and_receive(self, *arguments: object, **options: object) -> Iterable[Message]:
        raise AssertionError("replaced by the wrapper")


def nodes(replies: Iterable[Message]) -> list[int]:
    return [reply.metadata.src_node_id for reply in replies]


def test_every_reply_is_reported_as_it_comes() -> None:
    heard: list[tuple[int, int]] = []
    grid = ReportingGrid(Slow(3), lambda received, expected: heard.append((received, expected)))
    replies = grid.send_and_receive([message(number) for number in (1, 2, 3)])
    assert nodes(replies) == [1, 2, 3]
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_when_time_is_up_it_returns_what_came() -> None:
    grid = ReportingGrid(Slow(1), lambda *_: None)
    replies = grid.send_and_receive([message(number) for number in (1, 2)], timeout=0.3)
    assert nodes(replies) == [1]


def test_without_messages_it_does_not_wait() -> None:
    assert list(ReportingGrid(Slow(0), lambda *_: None).send_and_receive([])) == []


def test_waiting_ends_once_the_run_is_stopped() -> None:
    stop = threading.Event()
    grid = ReportingGrid(Slow(0), lambda *_: None, stop)
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Interrupted):
        grid.send_and_receive([message(1)], timeout=60)
    assert stop.is_set()


def test_everything_else_is_delegated() -> None:
    inner = Slow(0)
    grid = ReportingGrid(inner, lambda *_: None)
    assert grid.run == "the run"
    grid.set_run(3)
    grid.create_message(RecordDict(), "train", 7, "group")
    assert inner.created == [-1, 7]
    assert list(grid.push_messages([message(5)])) == ["message-5"]
    assert list(grid.pull_messages(["message-5"])) == []


def test_nodes_are_in_the_order_of_their_partitions() -> None:
    class Drawn(InProcessGrid):
        there = 2

        def get_node_ids(self) -> list[int]:
            return [3, 1, 2, 4][: self.there]

    app = ClientApp(mods=[measuring_mod])
    app.query()(lambda message, context: message)
    inner = Drawn(4, app)
    grid = ReportingGrid(inner, lambda *_: None)
    assert grid.get_node_ids() == [1, 3]
    inner.there = 4
    assert grid.get_node_ids() == [1, 2, 3, 4]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Listen to Ctrl-C as a program in the foreground does, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    # The handler runs between two steps of the main thread.
    time.sleep(0.01)


@pytest.mark.usefixtures("interruptible")
def test_the_first_interrupt_is_an_event_and_the_second_an_exception() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stopped_by_interrupt() as stop:
        assert not stop.is_set()
        interrupt()
        assert stop.is_set()
        interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_on_leaving_waiting_threads_are_stopped_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), stopped_by_interrupt() as stop:
        raise RuntimeError
    assert stop.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_leaves_the_handler_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def elsewhere() -> None:
        with stopped_by_interrupt() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.is_set()))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
