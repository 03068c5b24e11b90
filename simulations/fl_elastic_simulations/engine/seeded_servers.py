"""Flower's strategies, with the clients of each round drawn from a seed of their own.

Flower draws them from Python's global random numbers, which other threads, such as those of Ray, use as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy

__all__ = ["SERVERS"]


class _Seeded(FedAvg):
    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self._random = random.Random(seed)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        # Keep the number of clients and the content from Flower's messages, which is the same for all clients.
        messages = list(super().configure_train(server_round, arrays, config, grid))
        nodes = list(grid.get_node_ids())
        chosen = self._random.sample(nodes, min(len(messages), len(nodes)))
        return [
            Message(each.content, node, each.metadata.message_type)
            for each, node in zip(messages, chosen, strict=False)
        ]


class _SeededFedAvgM(_Seeded, FedAvgM):
    pass


class _SeededFedAdam(_Seeded, FedAdam):
    pass


SERVERS: dict[str, Callable[..., Strategy]] = {
    "fedavg": _Seeded,
    "fedavgm": lambda **options: _SeededFedAvgM(server_momentum=0.9, **options),
    "fedadam": lambda **options: _SeededFedAdam(eta=0.01, **options),
}
"""Strategies by their names in a scenario; each takes a ``seed`` and the options of `FedAvg`."""
