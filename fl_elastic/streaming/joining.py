"""How much of the federation's model a device takes: shares that are tried on its newest samples."""

from __future__ import annotations

from collections.abc import Sequence

from fl_elastic.errors import StreamError

__all__ = ["JOININGS", "shares_to_try"]

JOININGS = {"measured": (0.5, 0.0, 0.25, 0.75, 1.0), "replace": (1.0,)}
"""Shares by name: five that are tried, or all of the federation's model, as federated averaging takes."""


def shares_to_try(joining: str | Sequence[float]) -> tuple[float, ...]:
    """Return shares of the federation's model, from 0 to 1; StreamError if they mean nothing.

    The one that is right most often on the device's newest samples is taken, the first where there are none.

    >>> shares_to_try("replace"), shares_to_try([0.25])
    ((1.0,), (0.25,))
    """
    shares = JOININGS.get(joining) if isinstance(joining, str) else tuple(joining)
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise StreamError(
            f"joining {joining!r} means nothing: give {' or '.join(JOININGS)}, or shares from 0 to 1"
        )
    return shares
