"""Availability of clients: which of the chosen ones are sent a message, and how long a round waits for answers.

The inner strategy chooses clients first, for example by FedAvg's ``fraction_train``. Of these, clients that have
not answered are sent messages less and less often.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from fl_elastic.claims import outer

# Number of a node's last answering times that are kept.
_REMEMBERED = 5
# Patience as a multiple of the fleet's usual answering time, and of the node's own.
_FLEETS, _OWN = 10.0, 3.0
# Number of silent rounds in a row after which a node is not waited for.
_UNAWAITED = 2
# Most rounds between two messages to a silent node.
_LONGEST_PAUSE = 32


@dataclass
class Backoff:
    """Exponential back-off counted in rounds: the pause before the next attempt doubles with each failure.

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


@dataclass
class _Node:
    """Response times and silence of one node."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    silence: Backoff = field(
        default_factory=lambda: Backoff(_LONGEST_PAUSE, tolerance=_UNAWAITED - 1)
    )


class ClientAvailability:
    """Records how long each node takes to answer, and skips nodes that do not answer.

    A round waits once for a node that has never answered, for as long as the caller allows. A node that has
    answered is given ten times the usual answering time of this fleet, or three times its own, whichever is longer,
    and at least a minute. After two silent rounds a node is still sent messages, in fewer and fewer rounds, but no
    round waits for it until an answer arrives, however late.

    Parameters
    ----------
    least : float
        Shortest time that every node is given, in seconds.

    Examples
    --------
    >>> availability = ClientAvailability()
    >>> availability.patience([1, 2]) is None
    True
    >>> availability.heard(1, 20.0)
    >>> availability.missed(2)
    >>> availability.patience([1, 2])
    200.0
    """

    def __init__(self, least: float = 60.0) -> None:
        self.least = least
        self._nodes: dict[int, _Node] = {}

    def heard(self, node: int, seconds: float | None = None) -> None:
        """Note an answer and, if it was about training, after how many seconds it came."""
        known = self._nodes.setdefault(node, _Node())
        if seconds is not None:
            known.seconds.append(max(seconds, 0.0))
        known.silence.reset()

    def missed(self, node: int) -> None:
        """Note that a round ended without a node's answer."""
        self._nodes.setdefault(node, _Node()).silence.failed()

    def awaits(self, node: int) -> bool:
        """Return whether a round waits for this node's answer."""
        known = self._nodes.get(node)
        return known is None or known.silence.attempts < _UNAWAITED

    def due(self, nodes: Iterable[int]) -> set[int]:
        """Return the nodes to send a message to now; all of them if none is due."""
        every = set(nodes)
        silent = {node for node in every if not self._of(node).silence.is_due}
        return every - silent or every

    def passed_over(self, nodes: Iterable[int]) -> None:
        """Note a round in which these nodes were not asked."""
        for node in nodes:
            self._of(node).silence.passed()

    def _of(self, node: int) -> _Node:
        return self._nodes.get(node) or _Node()

    def least_seconds(self, node: int) -> float:
        """Return the shortest time of a node's last answers, in seconds; 0 if it has never answered."""
        known = self._nodes.get(node)
        return min(known.seconds, default=0.0) if known else 0.0

    def patience(self, nodes: Collection[int]) -> float | None:
        """Return how many seconds to wait for these nodes; None for no limit."""
        awaited = [node for node in nodes if self.awaits(node)] or list(nodes)
        last = [known.seconds[-1] for known in self._nodes.values() if known.seconds]
        if not last:
            return None
        usual = max(self.least, _FLEETS * inner_times(last)[-1])
        limits = []
        for node in awaited:
            known = self._nodes.get(node)
            if known is None or not (known.seconds or known.silence.attempts):
                return None
            own = float(np.median(known.seconds)) if known.seconds else 0.0
            limits.append(max(usual, _OWN * own))
        return max(limits, default=usual)


def inner_times(times: Iterable[float]) -> list[float]:
    """Return the times in order, with the lowest and highest fifth replaced by the next inner value.

    A few false claims then set neither the smallest nor the largest value; see `fl_elastic.claims.outer`.

    >>> inner_times([10.0, 1e-9, 30.0, 20.0, 1e15])
    [10.0, 10.0, 20.0, 30.0, 30.0]
    """
    ordered = sorted(times)
    cut = outer(len(ordered))
    if cut:
        ordered = [ordered[cut]] * cut + ordered[cut:-cut] + [ordered[-cut - 1]] * cut
    return ordered
