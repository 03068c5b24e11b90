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
    """A sample that asks for a place.

    Parameters
    ----------
    label : int
        Its class; -1 for none yet.
    draw : float
        Its number in a lottery, in [0, 1), from the store's seed and how many samples came before.
    """

    label: int
    draw: float


class StoragePolicy(ABC):
    """Chooses who leaves a full store.

    The table ``samples`` has the columns ``slot`` (place, primary key), ``id`` (bigger is newer), ``y`` (label, -1
    for none), ``draw`` and ``t``, with indices on ``id``, ``draw`` and ``(y, draw)``; ``classes`` has the number of
    samples ``n`` for each ``y``. Only look.
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
        del newcomer
        return _slot(connection, "SELECT slot FROM samples ORDER BY id LIMIT 1")


@STORAGE_POLICIES.register("reservoir")
class Reservoir(StoragePolicy):
    """Keeps each sample of the stream with the same probability (Vitter 1985): those with the smallest draws."""

    def victim(self, connection: sqlite3.Connection, newcomer: Newcomer) -> int | None:
        """Return the place of the largest draw, if the newcomer's is smaller."""
        row = connection.execute(
            "SELECT slot, draw FROM samples ORDER BY draw DESC LIMIT 1"
        ).fetchone()
        return int(row[0]) if row is not None and newcomer.draw < row[1] else None


@STORAGE_POLICIES.register("class_balanced")
class ClassBalanced(StoragePolicy):
    """Keeps as many of each class as it can, and within a class a reservoir (Chrysakis and Moens 2020).

    Samples without a label are a class of their own.
    """

    def victim(self, connection: sqlite3.Connection, newcomer: Newcomer) -> int | None:
        """Return a place of the largest class; within its own class the newcomer draws for it."""
        largest = connection.execute(
            "SELECT y, n FROM classes ORDER BY n DESC, y LIMIT 1"
        ).fetchone()
        if largest is None:
            return None
        own = connection.execute("SELECT n FROM classes WHERE y = ?", (newcomer.label,)).fetchone()
        from_own = own is not None and own[0] >= largest[1]
        label = newcomer.label if from_own else int(largest[0])
        row = connection.execute(
            "SELECT slot, draw FROM samples WHERE y = ? ORDER BY draw DESC LIMIT 1", (label,)
        ).fetchone()
        if row is None or (from_own and newcomer.draw >= row[1]):
            return None
        return int(row[0])


def _slot(connection: sqlite3.Connection, query: str) -> int | None:
    row = connection.execute(query).fetchone()
    return None if row is None else int(row[0])
