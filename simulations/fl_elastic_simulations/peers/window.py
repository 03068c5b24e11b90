"""FedEL's window: which blocks are trained in a round, and how the window moves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Window", "first_window", "next_window"]


@dataclass(frozen=True)
class Window:
    """Neighbouring blocks, counted from the input.

    Attributes
    ----------
    end, front : int
        Its edges towards the input and towards the output; both blocks belong to it.
    """

    end: int
    front: int


def first_window(seconds: Sequence[float], limit: float) -> Window:
    """Return the first blocks, as many as just reach the limit.

    Parameters
    ----------
    seconds : sequence of float
        Time of each block, from the input on.
    limit : float
        Seconds per step.

    Examples
    --------
    >>> first_window([2.0, 2.0, 2.0, 2.0], limit=3.0)
    Window(end=0, front=1)
    """
    return Window(0, _front(seconds, -1, limit))


def next_window(
    seconds: Sequence[float], limit: float, window: Window, selected: Collection[int]
) -> Window:
    """Return the window of the next round.

    The front moves over as many new blocks as just reach the limit; blocks at the end of which nothing was selected
    are dropped. Once the front has been at the last block, it begins anew.

    Parameters
    ----------
    seconds, limit : sequence of float, float
        As in `first_window`.
    window : Window
        Of the last round.
    selected : collection of int
        Blocks in which something was trained.

    Examples
    --------
    >>> next_window([2.0, 2.0, 2.0, 2.0, 2.0], 3.0, Window(0, 1), selected=[1])
    Window(end=1, front=3)
    """
    if window.front >= len(seconds) - 1:
        return first_window(seconds, limit)
    front = _front(seconds, window.front, limit)
    kept = [block for block in range(window.end, window.front + 1) if block in selected]
    return Window(kept[0] if kept else window.front + 1, front)


def _front(seconds: Sequence[float], before: int, limit: float) -> int:
    """Return the block up to which the blocks behind ``before`` just reach the limit."""
    front, spent = before + 1, seconds[before + 1]
    while front < len(seconds) - 1 and spent < limit:
        front += 1
        spent += seconds[front]
    return front
