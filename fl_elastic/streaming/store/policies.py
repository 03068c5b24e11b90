"""Storage policies: which samples stay when the store is full."""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from dataclasses import dataclass

# The class with the most samples; of equal ones, that of the newcomer.
_LARGEST = "SELECT y FROM classes ORDER BY n DESC, y = :label DESC, y LIMIT 1"

STORAGE_POLICIES = {
    "reservoir": "SELECT CASE WHEN draw > :draw THEN slot END FROM samples ORDER BY draw DESC LIMIT 1",
    "class_balanced": (
        "SELECT CASE WHEN y <> :label OR draw > :draw THEN slot END FROM samples "
        f"WHERE y = ({_LARGEST}) ORDER BY draw DESC LIMIT 1"
    ),
}
"""Storage policies by name: the SQL query for the slot that a newcomer takes; NULL rejects the newcomer.

``reservoir`` keeps each sample of the stream with equal probability (Vitter 1985): those with the smallest draws.
``class_balanced`` keeps equally many samples of each class as far as possible, with a reservoir within a class
(Chrysakis and Moens 2020); samples without a label form a class of their own.
"""


@dataclass(frozen=True)
class Newcomer:
    """A sample that is to be stored: its class as in column ``y``, and its number from the `lottery`."""

    label: int
    draw: float


def lottery(seed: int, number: int) -> float:
    """Return a random number in [0, 1) for the n-th sample of a stream; it is the same after every restart.

    Storage policies keep the samples with the smallest numbers.

    >>> lottery(0, 1) == lottery(0, 1) != lottery(0, 2)
    True
    """
    digest = hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=8).digest()
    return int(struct.unpack("<Q", digest)[0] >> 11) / 2.0**53


def victim(connection: sqlite3.Connection, policy: str, newcomer: Newcomer) -> int | None:
    """Return the slot that the newcomer takes under a storage policy; None to reject it."""
    given = {"label": newcomer.label, "draw": newcomer.draw}
    row = connection.execute(STORAGE_POLICIES[policy], given).fetchone()
    return None if row is None or row[0] is None else int(row[0])
