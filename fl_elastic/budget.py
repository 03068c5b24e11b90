"""What a device may spend in one round."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

from fl_elastic.errors import BudgetError

__all__ = ["Budget"]


_NOTHING = 1e-9


@dataclass(frozen=True)
class Budget:
    """What a device may spend; ``None`` means unlimited.

    Parameters
    ----------
    speedup : float, optional
        Full step time divided by the allowed step time, at least 1, which is no limit: full training takes the
        time that it takes. ElasticTrainer's rho is its inverse.
    deadline : float, optional
        Seconds for all local steps of one round.
    memory : float, optional
        Bytes that training may take at its peak beyond what holding the weights and running inference on a batch
        take: activations, gradients, optimiser state, the weights as they were, tensors on their way between
        operations, and, from 6 MB on, the code that a process loads to train: 24 MB in its first fit.
    uplink : float, optional
        Bytes that the partial update of one round may take: as the client's codec writes it, or as fp32 where a
        trainer runs by itself.
    bandwidth : float, optional
        Bytes per second of the way to the server. With it the deadline holds for training and sending together.

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
        """Return the share of the deadline that sending an update of that size takes.

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

    def after(self, seconds: float, full_step_seconds: float, steps: int) -> Budget:
        """Return what is left for ``steps`` steps once ``seconds`` of the time are spent.

        A speed-up holds over many fits, so one of few steps gives up half of its time at the most.

        A deadline that is spent leaves next to nothing: what can be done with that, says who takes the steps.

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
        """Return the seconds one local step may take, infinity when time is not limited.

        Parameters
        ----------
        full_step_seconds : float
            Seconds of one step that trains every tensor group.
        steps : int
            Local steps of the round, over which a deadline is spread.
        """
        allowed = math.inf
        if self.speedup is not None and self.speedup > 1:
            allowed = full_step_seconds / self.speedup
        if self.deadline is not None:
            allowed = min(allowed, self.deadline / max(steps, 1))
        return allowed


def _is_positive(value: object) -> bool:
    """Whether ``value`` is a positive finite number, of Python or of numpy."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False
