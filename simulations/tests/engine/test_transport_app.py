"""The app of the transport benchmark: each way trains, and sends what its name says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.transport_app import client_app, server_app

NODES = 2


class Weighed(InProcessGrid):
    """Keeps what each reply carried."""

    def __init__(self, way: str) -> None:
        super().__init__(NODES, client_app)
        self.replies: list[bytes] = []
        for context in self._contexts.values():
            context.run_config["way"] = way

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        replies = list(super().pull_messages(message_ids))
        self.replies += [carried(reply.content) for reply in replies]
        return replies

    def send_and_receive(
        self, messages: list[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        for reply in super().send_and_receive(messages, timeout=timeout):
            self.replies.append(carried(reply.content))
            yield reply


def carried(content: RecordDict) -> bytes:
    """Return all arrays and byte strings of a reply, end to end."""
    found = b""
    for record in content.values():
        if isinstance(record, ArrayRecord):
            found += b"".join(array.data for array in record.values() if isinstance(array, Array))
        elif isinstance(record, ConfigRecord):
            found += b"".join(value for value in record.values() if isinstance(value, bytes))
    return found


def test_each_way_sends_what_it_says_and_all_is_merged(tmp_path: Path) -> None:
    sizes = {}
    for way in ("unpacked", "packed", "packed, head", "packed, head, int8"):
        grid, results = Weighed(way), tmp_path / "results.json"
        settings = {"way": way, "nodes": NODES, "rounds": 1, "results": str(results)}
        context = Context(
            run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=settings
        )
        server_app(grid, context)
        found = json.loads(results.read_text())
        assert found["merged"] == NODES and found["seconds"] > 0
        first, second = grid.replies
        # Equal replies are stored once by a real server, and would be counted once.
        assert first != second
        sizes[way] = len(first)
    parameters = 4 * 3_504_872
    assert sizes["unpacked"] > parameters
    # Channels that did not move are left out.
    assert 0.9 * parameters < sizes["packed"] < sizes["unpacked"]
    head = 4 * (1280 * 1000 + 1000)
    assert 0.5 * head < sizes["packed, head"] < 1.05 * head
    assert sizes["packed, head, int8"] < 0.3 * sizes["packed, head"]
