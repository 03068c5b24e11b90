"""How many clients of a fleet may make false claims, and how many it takes to know what is usual."""

from __future__ import annotations

FEWEST = 3
"""Number of clients from which on claims show what is usual; one or two cannot be told apart."""


def may_lie(clients: int) -> int:
    """Return how many of ``clients`` clients may make false claims: a fifth, rounded up.

    Examples
    --------
    >>> [may_lie(clients) for clients in (0, 1, 5, 6, 20)]
    [0, 1, 1, 2, 4]
    """
    return -(-clients // 5)


def outer(claims: int) -> int:
    """Return how many of the largest claims, and of the smallest, do not count, so that liars decide nothing.

    As many as may be false, but something is left: of one or two claims all count.

    Examples
    --------
    >>> [outer(claims) for claims in (0, 1, 2, 3, 5, 6, 20)]
    [0, 0, 0, 1, 1, 2, 4]
    """
    return min(may_lie(claims), max(claims - 1, 0) // 2)
