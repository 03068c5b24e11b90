"""The number of clients of a fleet that may make false claims, and the number that defines usual values."""

from __future__ import annotations

FEWEST = 3
"""Least number of clients whose claims define usual values; of two, it is not known which is false."""


def may_lie(clients: int) -> int:
    """Return how many of ``clients`` clients may make false claims: a fifth, rounded up.

    Examples
    --------
    >>> [may_lie(clients) for clients in (0, 1, 5, 6, 20)]
    [0, 1, 1, 2, 4]
    """
    return -(-clients // 5)


def outer(claims: int) -> int:
    """Return how many of the largest claims, and of the smallest, to leave out, so that false ones have no effect.

    This is the number that may be false, but at least one claim is left; of one or two claims none is left out.

    Examples
    --------
    >>> [outer(claims) for claims in (0, 1, 2, 3, 5, 6, 20)]
    [0, 0, 0, 1, 1, 2, 4]
    """
    return min(may_lie(claims), max(claims - 1, 0) // 2)
