"""Names that senders give to their samples, so that one that is sent again is known."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SenderIds"]


class SenderIds:
    """The newest names, and which samples they stand for.

    Parameters
    ----------
    most : int
        Names that are kept.
    known : mapping of str to int
        Of an earlier life, oldest first.

    Examples
    --------
    >>> names = SenderIds(most=2)
    >>> for number, name in enumerate(["door-1", "door-2", "door-3"], start=1):
    ...     names.add(name, number)
    >>> names.number("door-1"), names.number("door-3"), names.to_facts()
    (None, 3, {'door-2': 2, 'door-3': 3})
    """

    def __init__(self, most: int, known: Mapping[str, int] | None = None) -> None:
        self._most = most
        self._known = dict(known or {})

    def add(self, name: str, number: int) -> None:
        """Remember which sample a name stands for."""
        self._known[name] = number
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def number(self, name: str) -> int | None:
        """Return which sample a name stands for; None if it is new, or forgotten."""
        return self._known.get(name)

    def to_facts(self) -> dict[str, int]:
        """Return it as JSON can hold it."""
        return dict(self._known)
