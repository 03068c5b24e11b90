"""Flower's FedAvg, with the clients of each round drawn from a seed of its own.

Flower draws them from Python's global random numbers, which other threads, such as those of Ray, use as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg


class SeededFedAvg(FedAvg):
    """FedAvg whose clients of each round depend only on ``seed``; it takes the options of Flower's strategy."""

    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self._random = random.Random(seed)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the round, to clients drawn from the seed."""
        # Keep the number of clients and the content from Flower's messages, which is the same for all clients.
        messages = list(super().configure_train(server_round, arrays, config, grid))
        nodes = list(grid.get_node_ids())
        chosen = self._random.sample(nodes, min(len(messages), len(nodes)))
        return [
            Message(each.content, node, each.metadata.message_type)
            for each, node in zip(messages, chosen, strict=False)
        ]
