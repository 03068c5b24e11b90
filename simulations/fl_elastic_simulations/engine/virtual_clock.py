"""Simulated time: what a round would have taken on the devices, computed instead of waited for.

Simulated time is host seconds times the device's slowdown, plus bytes over bandwidth. Everything
here is pure: the same costs give the same clock on any machine, and many clients can share a host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.scenario.devices import Device

__all__ = ["RoundCost", "round_cost", "synchronous_round_seconds"]


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
        """The whole round of this client, one part after the other."""
        return self.compute_seconds + self.uplink_seconds + self.downlink_seconds


def round_cost(
    device: Device, *, host_seconds: float, uplink_bytes: float, downlink_bytes: float
) -> RoundCost:
    """Translate what a round cost on the measuring host into what it costs on ``device``.

    Parameters
    ----------
    device : Device
        Where the round is supposed to run.
    host_seconds : float
        Seconds of local training on the host that measured.
    uplink_bytes, downlink_bytes : float
        Bytes to and from the server.

    Raises
    ------
    ScenarioError
        If a cost is negative or not finite.

    Examples
    --------
    >>> board = Device("board", "A board", 4.0, 2**30, 1e6, 2e6, "made up")
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


def synchronous_round_seconds(costs: Iterable[RoundCost]) -> float:
    """Return the simulated seconds of a round in which the server waits for everyone.

    Parameters
    ----------
    costs : iterable of RoundCost
        One per client that took part; the slowest decides, and nobody costs nothing.

    Examples
    --------
    >>> synchronous_round_seconds([RoundCost(1.0, 0.0, 0.0), RoundCost(3.0, 0.5, 0.0)])
    3.5
    >>> synchronous_round_seconds([])
    0.0
    """
    return max((cost.total for cost in costs), default=0.0)
