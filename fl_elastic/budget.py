"""The budget of a device for one round, and the largest update that is worth its time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fl_elastic.errors import BudgetError
from fl_elastic.given import is_real

_NOTHING = 1e-9
_MOST_OF_DEADLINE = 0.5


@dataclass(frozen=True)
class Budget:
    """Limits of what a device may spend; ``None`` means unlimited.

    Parameters
    ----------
    speedup : float, optional
        Full step time divided by the allowed step time, at least 1; 1 sets no limit on time. The paper on
        ElasticTrainer (Huang et al., MobiSys 2023) calls its inverse rho.
    deadline : float, optional
        Seconds for all local steps of one round.
    memory : float, optional
        Bytes that training may take at its peak, beyond those for the weights and for inference on a batch:
        activations, gradients, optimiser state, a copy of the initial weights, temporary tensors of operations,
        and, for limits from 6 MB on, the code that a process loads in order to train: 24 MB in its first fit.
    uplink : float, optional
        Bytes that the numbers of one round's partial update may take: as written by the client's codec, or as fp32
        for a trainer outside a federation. A header comes on top: about 100 bytes, and 7 for each tensor.
    bandwidth : float, optional
        Bytes per second of the connection to the server. If given, the deadline covers training and sending.

    Raises
    ------
    BudgetError
        If a value is not a positive finite number, or the speedup is below 1.

    Examples
    --------
    >>> Budget(speedup=2.0).allowed_step_seconds(0.1)
    0.05
    >>> Budget(deadline=3.0).allowed_step_seconds(0.1, steps=60)
    0.05
    >>> Budget().allowed_step_seconds(0.1), Budget(speedup=1).allowed_step_seconds(0.1)
    (inf, inf)
    >>> Budget(speedup=0.5)
    Traceback (most recent call last):
    fl_elastic.errors.BudgetError: speedup 0.5 is below 1: a budget cannot ask for more than full training
    """

    speedup: float | None = None
    deadline: float | None = None
    memory: float | None = None
    uplink: float | None = None
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in ("speedup", "deadline", "memory", "uplink", "bandwidth"):
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_positive(value):
                raise BudgetError(
                    f"{name} {value!r} is not a positive number; leave it out for no limit"
                )
        if self.speedup is not None and self.speedup < 1:
            raise BudgetError(
                f"speedup {self.speedup} is below 1: a budget cannot ask for more than full training"
            )

    def sending_seconds(self, sent_bytes: float) -> float:
        """Return the part of the deadline, in seconds, that sending an update of this size takes.

        Examples
        --------
        >>> Budget(deadline=10.0, bandwidth=1e6).sending_seconds(2.5e6)
        2.5
        >>> Budget(deadline=10.0).sending_seconds(2.5e6)
        0.0
        """
        if self.deadline is None or self.bandwidth is None:
            return 0.0
        return sent_bytes / self.bandwidth

    def sending_seconds_per_byte(self, steps: int) -> float:
        """Return the seconds that each byte of the update takes of each of ``steps`` local steps.

        >>> Budget(deadline=10.0, bandwidth=1e6).sending_seconds_per_byte(5)
        2e-07
        """
        return self.sending_seconds(1.0) / max(steps, 1)

    def after(self, seconds: float, full_step_seconds: float, steps: int) -> Budget:
        """Return the budget that is left for ``steps`` steps after ``seconds`` have been spent.

        A speed-up holds on average over many fits, so at most half of the time of a short fit is subtracted. If a
        deadline is used up, a tiny positive deadline is left, which the caller has to handle.

        Examples
        --------
        >>> Budget(deadline=10.0).after(4.0, full_step_seconds=1.0, steps=20).deadline
        6.0
        >>> Budget(speedup=2.0).after(5.0, full_step_seconds=1.0, steps=20).speedup
        4.0
        """
        left = self
        if self.deadline is not None and seconds > 0:
            left = replace(left, deadline=max(self.deadline - seconds, _NOTHING * self.deadline))
        if self.speedup is not None and self.speedup > 1 and seconds > 0 and steps:
            whole = full_step_seconds * steps
            allowed = whole / self.speedup
            left = replace(left, speedup=whole / max(allowed - seconds, allowed / 2))
        return left

    def allowed_step_seconds(self, full_step_seconds: float, steps: int = 1) -> float:
        """Return the seconds that one local step may take; infinity if time is not limited.

        Parameters
        ----------
        full_step_seconds : float
            Seconds of one step that trains every tensor group.
        steps : int
            Local steps of the round, among which a deadline is divided.
        """
        allowed = math.inf
        if self.speedup is not None and self.speedup > 1:
            allowed = full_step_seconds / self.speedup
        if self.deadline is not None:
            allowed = min(allowed, self.deadline / max(steps, 1))
        return allowed


def _is_positive(value: object) -> bool:
    """Return whether ``value`` is a positive finite number, of Python or of numpy."""
    if not is_real(value):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False


def sendable(budget: Budget) -> Budget:
    """Return the budget with an uplink limit that takes at most half of the deadline.

    An update that takes longer leaves too few steps to be worth sending.
    """
    most = most_to_send(budget)
    if most is None:
        return budget
    return replace(budget, uplink=most if budget.uplink is None else min(budget.uplink, most))


def most_to_send(budget: Budget) -> float | None:
    """Return the bytes that can be sent in half of the deadline; None for no limit."""
    if budget.deadline is None or budget.bandwidth is None:
        return None
    return _MOST_OF_DEADLINE * budget.deadline * budget.bandwidth


def too_much_to_send(budget: Budget, sent_bytes: float, who: str = "it") -> str:
    """Return a message that an update is too large for a budget from `sendable`, by the limit that the user set.

    The budget's deadline is what choosing has left of the user's deadline, so the message says how much more time
    is needed.

    >>> too_much_to_send(Budget(uplink=100.0), 250.0)
    'it sends 250 bytes, the uplink budget is 100: raise it to 250'
    """
    most, sent = most_to_send(budget), math.ceil(sent_bytes)
    assert budget.uplink is not None
    if most is None or budget.uplink < most:
        limit = f"{budget.uplink:.0f}"
        return f"{who} sends {sent} bytes, the uplink budget is {limit}: raise it to {sent}"
    assert budget.deadline is not None
    seconds = budget.sending_seconds(sent_bytes)
    # `Budget.after` leaves a tiny deadline if it is used up: report 0.
    left = budget.deadline if budget.deadline > 1e-6 * seconds else 0.0
    more = _rounded_up(seconds / _MOST_OF_DEADLINE - left)
    late = (
        f"sending its {sent} bytes takes {seconds:.3g} s, more than half of the {left:.3g} s that are left of the "
        f"deadline: allow at least {more:.3g} s more or use a smaller codec"
    )
    return late if who == "it" else f"{who}: {late}"


def _rounded_up(seconds: float) -> float:
    """Return the seconds rounded up to three digits, so that the suggested value is large enough.

    >>> _rounded_up(120.04), _rounded_up(120.0)
    (121.0, 120.0)
    """
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return math.ceil(seconds / unit * (1 - 1e-9)) * unit
