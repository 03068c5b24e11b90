"""Clients of the local engine that train several at a time: the same messages, answered elsewhere."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import active_children

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.engine.in_process_grid import (
    ClientProcesses,
    InProcessGrid,
    client_processes,
)

NODES = 7


def counting_app() -> ClientApp:
    """Says who answers, how often this node did, and twice what it was sent."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content["config"]
        if config.get("fails") == context.node_id:
            raise ValueError("no thanks")
        if config.get("dies") == context.node_id:
            os.kill(os.getpid(), signal.SIGKILL)
        before = context.state.get("seen", ConfigRecord({"times": 0}))["times"]
        context.state["seen"] = ConfigRecord({"times": before + 1})
        array = 2 * message.content["arrays"]["w"].numpy()
        said = {"node": context.node_id, "times": before + 1, "process": os.getpid()}
        return Message(
            RecordDict({"said": ConfigRecord(said), "arrays": ArrayRecord({"w": Array(array)})}),
            reply_to=message,
        )

    return app


def messages(**config: int) -> list[Message]:
    return [
        Message(
            RecordDict({
                "arrays": ArrayRecord({"w": Array(np.full(3, float(node)))}),
                "config": ConfigRecord(dict(config)),
            }),
            node, "train",
        )
        for node in range(1, NODES + 1)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Iterator[ClientProcesses]:
    """Two, which no test ends."""
    with client_processes(counting_app, 2) as processes:
        assert processes is not None
        yield processes


def test_replies_come_in_order_and_nodes_keep_their_state(processes: ClientProcesses) -> None:
    heard: list[tuple[int, int]] = []
    grid = InProcessGrid(NODES, ClientApp(), lambda *seen: heard.append(seen), processes=processes)
    for times in (1, 2):
        replies = list(grid.send_and_receive(messages()))
        said = [reply.content["said"] for reply in replies]
        assert [each["node"] for each in said] == list(range(1, NODES + 1))
        assert {each["times"] for each in said} == {times}
        assert os.getpid() not in {each["process"] for each in said}
        for node, reply in enumerate(replies, start=1):
            np.testing.assert_array_equal(reply.content["arrays"]["w"].numpy(), 2.0 * node)
            assert reply.metadata.src_node_id == node
    pushed = grid.push_messages(messages()[:1])
    (reply,) = grid.pull_messages(pushed)
    assert reply.content["said"]["times"] == 3 and not grid.pull_messages(pushed)
    assert heard == [(seen, NODES) for seen in range(1, NODES + 1)] * 2


def test_no_more_messages_are_out_than_the_processes_are_ahead(processes: ClientProcesses) -> None:
    taken: list[int] = []

    def asked(grid: InProcessGrid) -> Iterator[tuple[Message, Context]]:
        for message in messages():
            taken.append(message.metadata.dst_node_id)
            yield grid._named(message)

    replies = processes.answered(asked(InProcessGrid(NODES, ClientApp())))
    for number, expected in enumerate([4, 5, 6, 7, 7, 7, 7], start=1):
        assert next(replies).content["said"]["node"] == number
        assert len(taken) == expected


def test_what_a_client_raises_is_its_own_failure(processes: ClientProcesses) -> None:
    grid = InProcessGrid(NODES, ClientApp(), processes=processes)
    replies = list(grid.send_and_receive(messages(fails=3)))
    assert [reply.has_error() for reply in replies] == [node == 3 for node in range(1, NODES + 1)]
    assert "no thanks" in replies[2].error.reason


def test_a_process_that_ends_is_said() -> None:
    with client_processes(counting_app, 2) as processes:
        grid = InProcessGrid(NODES, ClientApp(), processes=processes)
        with pytest.raises(ScenarioError, match="use fewer workers"):
            list(grid.send_and_receive(messages(dies=2)))


def test_one_worker_is_this_process() -> None:
    with client_processes(counting_app, 1) as processes:
        assert processes is None


def test_processes_end_with_the_block() -> None:
    before = set(active_children())
    with client_processes(counting_app, 2) as processes:
        grid = InProcessGrid(NODES, ClientApp(), processes=processes)
        replies = list(grid.send_and_receive(messages()))
        children = set(active_children()) - before
        assert {reply.content["said"]["process"] for reply in replies} <= {
            child.pid for child in children
        }
    assert len(children) == 2
    # Whoever waits for them first, the pool's own thread or this one, is told: the other takes them for alive.
    end = time.monotonic() + 60
    while any(exists(child.pid) for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [child for child in children if exists(child.pid)]


def exists(process: int | None) -> bool:
    try:
        os.kill(process or 0, 0)
    except ProcessLookupError:
        return False
    return True
