"""What a store has been given of a stream, as it says itself in the same transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["Account"]


@dataclass(frozen=True)
class Account:
    """Which samples of a stream have gone to the store, kept there or not.

    Parameters
    ----------
    number : int
        All to this one have,
    beside : frozenset of int
        but for these.
    events : int
        Events of the learner whose changes have been made.

    Examples
    --------
    >>> account = Account.from_text(Account.of(12, [3, 11, 10, 4, 15], 20).to_text())
    >>> [number for number in range(1, 16) if not account.has(number)]
    [3, 4, 10, 11, 13, 14, 15]
    >>> account.to_text()
    '[12,[[3,4],[10,11]],20]'
    """

    number: int = 0
    beside: frozenset[int] = frozenset()
    events: int = 0

    @classmethod
    def of(cls, number: int, beside: Iterable[int], events: int) -> Account:
        """Return the account of all to ``number`` but those that are still beside."""
        return cls(number, frozenset(each for each in beside if 0 < each <= number), events)

    def without(self, number: int) -> Account:
        """Return the account once a sample has left the store."""
        return replace(self, beside=self.beside | {number})

    def has(self, number: int) -> bool:
        """Whether a sample has gone to the store; one without a number has not."""
        return 0 < number <= self.number and number not in self.beside

    def to_text(self) -> str:
        """Return it as short text: neighbours are told together."""
        spans: list[list[int]] = []
        for each in sorted(self.beside):
            if spans and each == spans[-1][1] + 1:
                spans[-1][1] = each
            else:
                spans.append([each, each])
        return json.dumps([self.number, spans, self.events], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Account:
        """Read what `to_text` wrote; nothing has gone where it is something else."""
        try:
            number, spans, events = json.loads(text)
            beside = [each for first, last in spans for each in range(first, last + 1)]
            return cls(int(number), frozenset(beside), int(events))
        except (ValueError, TypeError, RecursionError):
            return cls()
