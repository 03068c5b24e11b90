"""How much of the federation's model a device takes: candidate shares are tried on its newest samples."""

from __future__ import annotations

from collections.abc import Sequence

from fl_elastic.errors import StreamError

__all__ = ["JOININGS", "shares_to_try"]

JOININGS = {"measured": (0.5, 0.0, 0.25, 0.75, 1.0), "replace": (1.0,)}
"""Candidate shares by name: five to try, or the whole of the federation's model, as in federated averaging."""


def shares_to_try(joining: str | Sequence[float]) -> tuple[float, ...]:
    """Return candidate shares of the federation's model, from 0 to 1; StreamError if they are invalid.

    The share with the highest accuracy on the device's newest samples is taken; without samples, the first one.

    >>> shares_to_try("replace"), shares_to_try([0.25])
    ((1.0,), (0.25,))
    """
    shares = JOININGS.get(joining) if isinstance(joining, str) else tuple(joining)
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise StreamError(
            f"joining {joining!r} means nothing: give {' or '.join(JOININGS)}, or shares from 0 to 1"
        )
    return shares
