"""Exponential back-off: after each failed attempt, more rounds pass before the next one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass
class Backoff:
    """Rounds until the next attempt; they double with each failed attempt.

    Attributes
    ----------
    longest : int
        Largest number of rounds between two attempts.
    tolerance : int
        Number of failed attempts after which the next round is still not skipped.
    attempts : int
        Failed attempts since `reset`.
    left : int
        Rounds to skip before the next attempt.

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
        """Count a round without an attempt."""
        self.left = max(self.left - 1, 0)

    def failed(self) -> None:
        """Count a failed attempt, and set how many rounds to skip."""
        self.attempts += 1
        excess = self.attempts - self.tolerance - 1
        self.left = 0 if excess < 0 else min(2**excess, self.longest)

    def reset(self) -> None:
        """Forget the failed attempts, after a successful one."""
        self.attempts = self.left = 0
