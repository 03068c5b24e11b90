"""Which samples of a stream its store was given; the store writes this record together with the samples."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class IngestedSamples:
    """The samples that the store was given, whether it kept them or not.

    Parameters
    ----------
    number : int
        Every sample up to this one was given, except those in ``beside``.
    beside : frozenset of int
        Samples up to ``number`` that were not given.
    events : int
        Number of the learner's events whose changes have been written.

    Examples
    --------
    >>> given = IngestedSamples.of(12, [3, 11, 10, 4, 15], 20)
    >>> IngestedSamples.from_text(given.to_text()) == given
    True
    >>> [number for number in range(1, 16) if not given.has(number)]
    [3, 4, 10, 11, 13, 14, 15]
    >>> given.to_text()
    '[12,[[3,4],[10,11]],20]'
    """

    number: int = 0
    beside: frozenset[int] = frozenset()
    events: int = 0

    @classmethod
    def of(cls, number: int, beside: Iterable[int], events: int) -> IngestedSamples:
        """Return all samples up to ``number``, except those in ``beside``."""
        return cls(number, frozenset(each for each in beside if 0 < each <= number), events)

    def without(self, number: int) -> IngestedSamples:
        """Return a copy for a store from which this sample was withdrawn, so that it counts as not given."""
        return replace(self, beside=self.beside | {number})

    def has(self, number: int) -> bool:
        """Return whether the store was given a sample; False for a sample without a number."""
        return 0 < number <= self.number and number not in self.beside

    def to_text(self) -> str:
        """Return a JSON list: highest number given, [first, last] of each gap below it, number of events."""
        spans: list[list[int]] = []
        for each in sorted(self.beside):
            if spans and each == spans[-1][1] + 1:
                spans[-1][1] = each
            else:
                spans.append([each, each])
        return json.dumps([self.number, spans, self.events], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> IngestedSamples:
        """Read the text of `to_text`; any other text means that nothing was given."""
        try:
            number, spans, events = json.loads(text)
            beside = [each for first, last in spans for each in range(first, last + 1)]
            return cls(int(number), frozenset(beside), int(events))
        except (ValueError, TypeError, RecursionError):
            return cls()
