"""Ids and labels of the samples that may be drawn, read again only when something has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Drawable", "Read"]

Read = Callable[[str, Sequence[object]], list[Any]]
"""``(query, values)`` to rows."""

Table = tuple[NDArray[np.int64], NDArray[np.int64]]


class Drawable:
    """What can be drawn from a store's file.

    Parameters
    ----------
    read : callable
        Asks the file.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._own_writes = 0
        self._known: tuple[object, Table] | None = None

    def changed(self) -> None:
        """Say that this process has written; writes of others are noticed."""
        self._own_writes += 1

    def forget(self) -> None:
        """Read everything again: it is another file."""
        self._known = None

    def table(self, labelled: bool, version: str | None) -> Table:
        """Return ids and labels, of samples that have a label or of all, of one version or of any."""
        others = self._read("PRAGMA data_version", ())
        state = (others, self._own_writes, labelled, version)
        if self._known is None or self._known[0] != state:
            conditions, values = ["y >= 0" if labelled else "1"], list[object]()
            if version is not None:
                conditions.append("version = ?")
                values.append(version)
            query = f"SELECT id, y FROM samples WHERE {' AND '.join(conditions)} ORDER BY id"
            found = np.array(self._read(query, values), np.int64).reshape(-1, 2)
            self._known = (state, (found[:, 0], found[:, 1]))
        return self._known[1]
