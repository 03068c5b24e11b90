"""Which samples stay when the store is full."""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass

from fl_elastic.registry import Factories

__all__ = ["STORAGE_POLICIES", "Newcomer", "StoragePolicy", "lottery"]


@dataclass(frozen=True)
class Newcomer:
    """A sample that asks for a place: its class as column ``y`` has it, and its number in the `lottery`."""

    label: int
    draw: float


class StoragePolicy(ABC):
    """Chooses who leaves a full store.

    The table ``samples`` has the columns ``slot`` (place, primary key), ``id`` (bigger is newer), ``y`` (a
    number for each class, and one for no label), ``draw`` and ``t``, with indices on ``id``, ``draw`` and
    ``(y, draw)``; ``classes`` has the number of samples ``n`` for each ``y``. Only look.
    """

    @abstractmethod
    def victim(self, connection: sqlite3.Connection, newcomer: Newcomer) -> int | None:
        """Return the slot that the newcomer takes; None to turn it away."""


STORAGE_POLICIES: Factories[StoragePolicy] = Factories("storage policy")
"""Storage policies by name."""


def lottery(seed: int, number: int) -> float:
    """Return the draw of the n-th sample of a stream, the same after every restart.

    >>> lottery(0, 1) == lottery(0, 1) != lottery(0, 2)
    True
    """
    digest = hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=8).digest()
    return int(struct.unpack("<Q", digest)[0] >> 11) / 2.0**53


@STORAGE_POLICIES.register("ring")
class Ring(StoragePolicy):
    """Keeps the newest."""

    def victim(self, connection: sqlite3.Connection, newcomer: Newcomer) -> int | None:
        """Return the oldest sample's place."""
        return _asked(connection, "SELECT slot FROM samples ORDER BY id LIMIT 1", newcomer)


@STORAGE_POLICIES.register("reservoir")
class Reservoir(StoragePolicy):
    """Keeps each sample of the stream with the same probability (Vitter 1985): those with the smallest draws."""

    def victim(self, connection: sqlite3.Connection, newcomer: Newcomer) -> int | None:
        """Return the place of the largest draw, if the newcomer's is smaller."""
        slot = "CASE WHEN draw > :draw THEN slot END"
        return _asked(
            connection, f"SELECT {slot} FROM samples ORDER BY draw DESC LIMIT 1", newcomer
        )


@STORAGE_POLICIES.register("class_balanced")
class ClassBalanced(StoragePolicy):
    """Keeps as many of each class as it can, and within a class a reservoir (Chrysakis and Moens 2020).

    Samples without a label are a class of their own.
    """

    def victim(self, connection: sqlite3.Connection, newcomer: Newcomer) -> int | None:
        """Return a place of the largest class; within its own class the newcomer draws for it."""
        slot = "CASE WHEN y <> :label OR draw > :draw THEN slot END"
        largest = "SELECT y FROM classes ORDER BY n DESC, y = :label DESC, y LIMIT 1"
        query = f"SELECT {slot} FROM samples WHERE y = ({largest}) ORDER BY draw DESC LIMIT 1"
        return _asked(connection, query, newcomer)


def _asked(connection: sqlite3.Connection, query: str, newcomer: Newcomer) -> int | None:
    row = connection.execute(query, {"label": newcomer.label, "draw": newcomer.draw}).fetchone()
    return None if row is None or row[0] is None else int(row[0])
