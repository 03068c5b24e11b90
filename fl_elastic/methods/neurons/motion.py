"""The change of neurons' outputs and the velocity of this change: arithmetic on one number per neuron."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Motion:
    r"""The motion of neurons as observed so far.

    Here :math:`d_t = 1 - \phi_t` is the change of a neuron's output from one observation to the next, and
    :math:`g_t = d_{t-1} - d_t` the change of its similarity (Bragagnolo et al., NEq, NeurIPS 2022).

    Attributes
    ----------
    count : int
        Number of observed changes.
    change, gain, velocity : array, shape (C,)
        The last d, g and v; zeros before the first observation.

    Examples
    --------
    The second velocity by the paper's formula is the first one computed from two changes:

    >>> motion = Motion.at_rest(1)
    >>> seen = []
    >>> for change in (0.4, 0.2, 0.1, 0.1):
    ...     motion = motion.after(np.array([change]))
    ...     seen.append(round(float(motion.velocity[0]), 6))
    >>> seen
    [0.0, 0.2, 0.0, 0.0]
    """

    count: int
    change: Values
    gain: Values
    velocity: Values

    @classmethod
    def at_rest(cls, neurons: int) -> Motion:
        """Return the motion before any observation."""
        return cls(0, *(np.zeros(neurons) for _ in range(3)))

    def after(self, change: Values, mu: float = 0.5) -> Motion:
        r"""Return the motion after one more change was observed.

        As in the paper, :math:`v_t = g_t - \mu v_{t-1}` with :math:`v_0 = 0`; the published code has another
        formula.
        """
        gain = self.change - change
        velocity = gain - mu * self.velocity if self.count else np.zeros_like(gain)
        return Motion(self.count + 1, change, gain, velocity)

    @property
    def known(self) -> bool:
        """Whether the velocity is meaningful yet."""
        return self.count >= 2


def within(score: Values, sizes: Values, budget: float) -> NDArray[np.bool_]:
    """Return a mask of the neurons that train under a budget of parameters, shape (C,).

    Neurons are taken by falling score while the sum of their sizes stays within the budget. The score of the first
    neuron that does not fit is the threshold: everything at or below it is frozen, including ties (Quelennec et
    al., WACV 2024).

    Examples
    --------
    >>> within(np.array([3.0, 1.0, 2.0]), np.array([4.0, 1.0, 4.0]), 8.0).tolist()
    [True, False, True]
    """
    order = np.argsort(-score, kind="stable")
    spent = np.cumsum(sizes[order])
    count = int(np.searchsorted(spent, budget * (1 + 1e-12), side="right"))
    if count == len(score):
        return np.ones(len(score), dtype=bool)
    trains: NDArray[np.bool_] = score > score[order[count]]
    return trains
