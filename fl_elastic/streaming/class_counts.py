"""How many samples of each label a store has, counted along within a transaction."""

from __future__ import annotations

import sqlite3
from collections import Counter

__all__ = ["ClassCounts"]


class ClassCounts:
    """Changes of the table ``classes``, written when `settle` is called.

    Parameters
    ----------
    connection : Connection
        In a transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._changes: Counter[int] = Counter()

    def add(self, label: int, change: int) -> None:
        """Note that there are so many more samples of a label."""
        self._changes[label] += change

    def settle(self) -> None:
        """Write what has changed."""
        changed = [(label, change) for label, change in self._changes.items() if change]
        self._changes.clear()
        if changed:
            self._connection.executemany(
                "INSERT INTO classes VALUES (?, ?) ON CONFLICT(y) DO UPDATE SET n = n + excluded.n",
                changed,
            )
