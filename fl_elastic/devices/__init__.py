"""What a device tells of itself: processors, memory, power, heat and energy."""

from __future__ import annotations

from fl_elastic.devices.energy import EnergyMeter, EnergyReading
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

__all__ = [
    "EnergyMeter",
    "EnergyReading",
    "Memory",
    "Platform",
    "PowerSupply",
    "Processors",
    "Throttling",
    "board_model",
    "disk_free_bytes",
    "memory",
    "power_supply",
    "processors",
    "read_platform",
    "temperature",
    "throttling",
]
