"""Simulated time: the time that a round would take on the devices, computed instead of waited for.

Simulated time is host seconds times the device's slowdown, plus bytes over bandwidth. All functions here are pure:
the same costs give the same clock on any machine, and many clients can share a host.

Both scenarios (`fl_elastic_simulations.engine`) and other Flower apps (`UnequalGrid`) use these functions to decide
how long a round takes and which device is late; `fl_elastic_simulations.unequal.outcome` decides the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.unequal.devices import Device

# A deadline is often computed from the times that it is compared with: rounding must not decide.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class RoundCost:
    """Simulated seconds that one client spends in one round.

    Parameters
    ----------
    compute_seconds : float
        Local training.
    uplink_seconds : float
        Sending the update.
    downlink_seconds : float
        Receiving the model.

    Examples
    --------
    >>> RoundCost(compute_seconds=2.0, uplink_seconds=0.5, downlink_seconds=0.25).total
    2.75
    """

    compute_seconds: float
    uplink_seconds: float
    downlink_seconds: float

    @property
    def total(self) -> float:
        """Seconds of this client's whole round, its parts one after the other."""
        return self.compute_seconds + self.uplink_seconds + self.downlink_seconds


def round_cost(
    device: Device, *, host_seconds: float, uplink_bytes: float, downlink_bytes: float
) -> RoundCost:
    """Convert the cost of a round on the measuring host into its cost on ``device``.

    Parameters
    ----------
    device : Device
        The device to simulate.
    host_seconds : float
        Seconds of local training on the measuring host.
    uplink_bytes, downlink_bytes : float
        Bytes to and from the server.

    Raises
    ------
    ScenarioError
        If a cost is negative or not finite.

    Examples
    --------
    >>> board = Device("board", "A board", 4.0, 1e6, 2e6)
    >>> round_cost(board, host_seconds=0.5, uplink_bytes=1e6, downlink_bytes=1e6)
    RoundCost(compute_seconds=2.0, uplink_seconds=1.0, downlink_seconds=0.5)
    """
    costs = {
        "host_seconds": host_seconds,
        "uplink_bytes": uplink_bytes,
        "downlink_bytes": downlink_bytes,
    }
    for name, value in costs.items():
        if not math.isfinite(value) or value < 0:
            raise ScenarioError(f"{name} {value!r} of a round is not zero or a positive number")
    return RoundCost(
        compute_seconds=host_seconds * device.slowdown,
        uplink_seconds=uplink_bytes / device.uplink_bytes_per_second,
        downlink_seconds=downlink_bytes / device.downlink_bytes_per_second,
    )


def in_time(seconds: float, deadline: float | None) -> bool:
    """Return whether work of this duration keeps a deadline; None is no deadline.

    >>> in_time(10.0, 10.0), in_time(10.1, 10.0), in_time(10.1, None)
    (True, False, True)
    """
    return deadline is None or seconds <= deadline * (1 + _TOLERANCE)


def round_seconds(
    arrivals: Iterable[float],
    *,
    deadline: float | None = None,
    missing: bool = False,
    told: float = 0.0,
) -> float:
    """Return the simulated seconds that a server waits in a round.

    Parameters
    ----------
    arrivals : iterable of float
        Seconds after which the server hears of each client that answers in time.
    deadline : float, optional
        Seconds for which it waits for the others.
    missing : bool
        Whether there are others.
    told : float
        Seconds after which all clients have received the model, including those that then stay out of the round.

    Examples
    --------
    >>> round_seconds([1.0, 3.5]), round_seconds([1.0, 3.5], deadline=5.0, missing=True)
    (3.5, 5.0)
    >>> round_seconds([])
    0.0
    """
    waited = deadline if missing and deadline is not None else 0.0
    return max((*arrivals, told, waited))


class Clock(Protocol):
    """The simulated time of a fleet."""

    @property
    def now(self) -> float:
        """Simulated seconds since the start."""

    def wait_until(self, until: float) -> None:
        """Advance time to ``until``, unless it is past."""


@dataclass
class SimulatedClock:
    """A clock that only an `UnequalGrid` advances.

    Attributes
    ----------
    now : float
        Simulated seconds since the start.
    """

    now: float = 0.0

    def wait_until(self, until: float) -> None:
        """Advance time to ``until``, unless it is past."""
        self.now = max(self.now, until)
