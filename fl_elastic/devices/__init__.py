"""Who the clients are: known devices, and the clock that tells what a round costs on them."""

from __future__ import annotations

from fl_elastic.devices.hardware import Device, catalogue, device
from fl_elastic.devices.virtual_clock import RoundCost, round_cost, synchronous_round_seconds

__all__ = [
    "Device",
    "RoundCost",
    "catalogue",
    "device",
    "round_cost",
    "synchronous_round_seconds",
]
