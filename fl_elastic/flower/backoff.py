"""Exponential back-off: after each answer that is missing or unchanged, more rounds pass before the next one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass
class Backoff:
    """Rounds until something is tried again; they double with each attempt in vain.

    Attributes
    ----------
    longest : int
        Rounds between two attempts at most.
    tolerance : int
        Attempts in vain after which the next round is not passed over yet.
    attempts : int
        In vain since `reset`.
    left : int
        Rounds to pass over before the next attempt.

    Examples
    --------
    >>> backoff, tried = Backoff(longest=4), []
    >>> for number in range(1, 14):
    ...     if backoff.is_due:
    ...         tried.append(number)
    ...         backoff.failed()
    ...     else:
    ...         backoff.passed()
    >>> tried
    [1, 3, 6, 11]
    """

    longest: int
    tolerance: int = 0
    attempts: int = 0
    left: int = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time for another attempt."""
        return self.left == 0

    def passed(self) -> None:
        """Count a round in which nothing was tried."""
        self.left = max(self.left - 1, 0)

    def failed(self) -> None:
        """Count an attempt in vain."""
        self.attempts += 1
        excess = self.attempts - self.tolerance - 1
        self.left = 0 if excess < 0 else min(2**excess, self.longest)

    def reset(self) -> None:
        """Begin anew, after an attempt that was not in vain."""
        self.attempts = self.left = 0
