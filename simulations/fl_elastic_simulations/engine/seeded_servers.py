"""Flower's strategies, choosing the clients of each round by a seed of their own.

Flower draws them from Python's global random numbers, of which others in the process, such as Ray, take some.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy

__all__ = ["SERVERS"]


class _Seeded(FedAvg):
    def __init__(self, *, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self._draws = random.Random(seed).getstate()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with self._own_draws():
            return list(super().configure_train(server_round, arrays, config, grid))

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Draw from this strategy's own numbers, and leave everybody else's as they were."""
        others = random.getstate()
        random.setstate(self._draws)
        try:
            yield
        finally:
            self._draws = random.getstate()
            random.setstate(others)


class _SeededFedAvgM(_Seeded, FedAvgM):
    pass


class _SeededFedAdam(_Seeded, FedAdam):
    pass


SERVERS: dict[str, Callable[..., Strategy]] = {
    "fedavg": _Seeded,
    "fedavgm": lambda **options: _SeededFedAvgM(server_momentum=0.9, **options),
    "fedadam": lambda **options: _SeededFedAdam(eta=0.01, **options),
}
"""By the name in a scenario; each takes a ``seed`` and the options of `FedAvg`."""
