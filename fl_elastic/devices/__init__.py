"""Who the clients are: known devices, the clock of a round on them, and what a real one tells."""

from __future__ import annotations

from fl_elastic.devices.energy import EnergyMeter, EnergyReading
from fl_elastic.devices.hardware import Device, catalogue, device
from fl_elastic.devices.platform import (
    Platform,
    Processors,
    board_model,
    disk_free_bytes,
    processors,
    read_platform,
)
from fl_elastic.devices.platform_memory import Memory, memory
from fl_elastic.devices.power import PowerSupply, power_supply
from fl_elastic.devices.thermal import Throttling, temperature, throttling
from fl_elastic.devices.virtual_clock import RoundCost, round_cost, synchronous_round_seconds

__all__ = [
    "Device",
    "EnergyMeter",
    "EnergyReading",
    "Memory",
    "Platform",
    "PowerSupply",
    "Processors",
    "RoundCost",
    "Throttling",
    "board_model",
    "catalogue",
    "device",
    "disk_free_bytes",
    "memory",
    "power_supply",
    "processors",
    "read_platform",
    "round_cost",
    "synchronous_round_seconds",
    "temperature",
    "throttling",
]
